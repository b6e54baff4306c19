"""The parts of a configuration that say how weights are updated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from onstep.config.part import INCOMPATIBLE, SAFE, TRAJECTORY, ConfigPart, option


@dataclass
class OptimizerConfig(ConfigPart):
    """The optimizer: AdamW (`adam`), `sgd` or `muon`."""

    optimizer: str = option("adam", INCOMPATIBLE, choices=("adam", "sgd", "muon"))
    """adam (AdamW) | sgd | muon (matrices of the layers by torch's Muon; embeddings, output, biases, norms and stacked
    weights of experts by AdamW)"""
    lr: float | None = option(None, TRAJECTORY, bound="> 0")
    """Largest learning rate."""
    min_lr: float | None = option(None, TRAJECTORY, bound=">= 0")
    """Where the schedule ends; None is 0."""
    weight_decay: float = option(0.01, TRAJECTORY, bound=">= 0")
    """Decoupled decay of matrices; vectors do not decay."""
    adam_beta1: float = option(0.9, TRAJECTORY, bound="at least 0 and below 1")
    """Decay of the first moment."""
    adam_beta2: float = option(0.999, TRAJECTORY, bound="at least 0 and below 1")
    """Decay of the second moment."""
    adam_eps: float = option(1e-8, TRAJECTORY, bound="> 0")
    """Added to the denominator."""
    sgd_momentum: float = option(0.9, TRAJECTORY, bound="at least 0 and below 1")
    """Momentum of SGD."""
    clip_grad: float | None = option(1.0, TRAJECTORY, bound=">= 0")
    """Largest global gradient norm; None or 0 does not clip. The norm is computed either way."""
    loss_scale: float | None = option(None, TRAJECTORY, bound="> 0")
    """A constant loss scale, for float16 and bfloat16; None scales float16 dynamically and bfloat16 not at all."""
    initial_loss_scale: float = option(2.0**32, TRAJECTORY, bound="> 0")
    """Where the dynamic loss scale starts."""
    min_loss_scale: float = option(1.0, TRAJECTORY, bound="> 0")
    """Where it ends falling: an overflow there is an anomaly."""
    loss_scale_window: int = option(1000, TRAJECTORY, bound="> 0")
    """Clean steps after which it doubles."""
    hysteresis: int = option(2, TRAJECTORY, bound="> 0")
    """Overflows after which it halves."""
    muon_momentum: float = option(0.95, TRAJECTORY, bound="at least 0 and below 1")
    """Momentum of Muon."""
    muon_nesterov: bool = option(True, TRAJECTORY)
    """Nesterov's form of it."""
    muon_num_ns_steps: int = option(5, TRAJECTORY, bound="> 0")
    """Newton-Schulz iterations that orthogonalize an update."""
    muon_adjust_lr_fn: str = option("match_rms_adamw", TRAJECTORY, choices=("match_rms_adamw", "original"))
    """How Muon's rate follows from `lr`: match_rms_adamw (updates as large as AdamW's) | original."""
    decoupled_lr: float | None = option(None, TRAJECTORY, bound="> 0")
    """Largest learning rate of the embedding and output matrices; None is `lr`. Their own `is_decoupled_lr` groups."""
    decoupled_min_lr: float | None = option(None, TRAJECTORY, bound=">= 0")
    """Where their schedule ends; None is `min_lr`."""
    param_groups: list[dict[str, Any]] = option([], INCOMPATIBLE)
    """Settings of some parameters, the first entry that matches a name holds: {match: '*.router.*', lr_mult: 0.1,
    wd_mult: 0.0, max_lr: ..., min_lr: ..., start_wd: ..., end_wd: ...}. `*` stands for any letters, dots too. An entry
    that matches no trainable parameter is refused."""
    grad_norm_skip_threshold: float | None = option(None, TRAJECTORY, bound="> 0", may_be_infinite=True)
    """A step whose gradient norm before clipping is above this updates nothing, counts as skipped and does not move the
    schedule; None, or infinity as in Megatron Bridge, skips none. It costs one wait for an accelerator at each step."""
    log_num_zeros_in_grad: bool = option(False, SAFE)
    """Count the exact zeros among the gradients of each step, after clipping."""


@dataclass
class SchedulerConfig(ConfigPart):
    """Learning rate and weight decay as a function of progress."""

    lr_decay_style: str = option(
        "linear", TRAJECTORY, choices=("constant", "linear", "cosine", "inverse-square-root", "WSD")
    )
    """constant | linear | cosine | inverse-square-root | WSD"""
    lr_wsd_decay_style: str = option(
        "exponential", TRAJECTORY, choices=("linear", "cosine", "exponential", "minus_sqrt")
    )
    """linear | cosine | exponential | minus_sqrt"""
    lr_decay_iters: int | None = option(None, TRAJECTORY, bound="> 0")
    """Step at which the schedule ends; None is the run's last."""
    lr_decay_samples: int | None = option(None, TRAJECTORY, bound="> 0")
    """The same in samples."""
    lr_wsd_decay_iters: int | None = option(None, TRAJECTORY, bound="> 0")
    """Length of WSD's last phase in steps."""
    lr_wsd_decay_samples: int | None = option(None, TRAJECTORY, bound="> 0")
    """The same in samples."""
    lr_warmup_fraction: float | None = option(None, TRAJECTORY, bound=">= 0")
    """Warm-up as a share of the schedule."""
    lr_warmup_iters: int = option(0, TRAJECTORY, bound=">= 0")
    """Warm-up in steps, of which the schedule has more."""
    lr_warmup_samples: int = option(0, TRAJECTORY, bound=">= 0")
    """Warm-up in samples, of which the schedule has more."""
    lr_warmup_init: float = option(0.0, TRAJECTORY, bound=">= 0")
    """Learning rate at step 0 of the warm-up."""
    start_weight_decay: float | None = option(None, TRAJECTORY, bound=">= 0")
    """Weight decay at step 0; None is `optimizer.weight_decay`."""
    end_weight_decay: float | None = option(None, TRAJECTORY, bound=">= 0")
    """Weight decay at the end; None is `optimizer.weight_decay`."""
    weight_decay_incr_style: str = option("constant", TRAJECTORY, choices=("constant", "linear", "cosine"))
    """constant | linear | cosine"""
    max_steps: int | None = option(None, TRAJECTORY, bound="> 0")
    """Build the schedule for a run of this many steps (at least `train_iters`)."""
    override_opt_param_scheduler: bool = option(False, SAFE)
    """On resume, the configured schedule holds, whatever the checkpoint's was and `checkpoint.on_config_change` is."""
    use_checkpoint_opt_param_scheduler: bool = option(False, SAFE)
    """On resume, the checkpoint's schedule holds, whatever is configured and `checkpoint.on_config_change` is. With
    neither, a schedule that differs is refused with both values, unless `checkpoint.on_config_change=apply`."""
