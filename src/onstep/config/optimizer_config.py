"""The parts of a configuration that say how weights are updated."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from onstep.config.part import ConfigPart


@dataclass
class OptimizerConfig(ConfigPart):
    """The optimizer: AdamW (`adam`), `sgd` or `muon`."""

    optimizer: str = "adam"
    """adam (AdamW) | sgd | muon (matrices of the layers by torch's Muon; embeddings, output, biases, norms and stacked
    weights of experts by AdamW)"""
    lr: float | None = None
    """Largest learning rate."""
    min_lr: float | None = None
    """Where the schedule ends; None is 0."""
    weight_decay: float = 0.01
    """Decoupled decay of matrices; vectors do not decay."""
    adam_beta1: float = 0.9
    """Decay of the first moment."""
    adam_beta2: float = 0.999
    """Decay of the second moment."""
    adam_eps: float = 1e-8
    """Added to the denominator."""
    sgd_momentum: float = 0.9
    """Momentum of SGD."""
    clip_grad: float | None = 1.0
    """Largest global gradient norm; None or 0 does not clip. The norm is computed either way."""
    loss_scale: float | None = None
    """A constant loss scale, for float16 and bfloat16; None scales float16 dynamically and bfloat16 not at all."""
    initial_loss_scale: float = 2.0**32
    """Where the dynamic loss scale starts."""
    min_loss_scale: float = 1.0
    """Where it ends falling: an overflow there is an anomaly."""
    loss_scale_window: int = 1000
    """Clean steps after which it doubles."""
    hysteresis: int = 2
    """Overflows after which it halves."""
    muon_momentum: float = 0.95
    """Momentum of Muon."""
    muon_nesterov: bool = True
    """Nesterov's form of it."""
    muon_num_ns_steps: int = 5
    """Newton-Schulz iterations that orthogonalize an update."""
    muon_adjust_lr_fn: str = "match_rms_adamw"
    """How Muon's rate follows from `lr`: match_rms_adamw (updates as large as AdamW's) | original."""
    decoupled_lr: float | None = None
    """Largest learning rate of the embedding and output matrices; None is `lr`. Their own `is_decoupled_lr` groups."""
    decoupled_min_lr: float | None = None
    """Where their schedule ends; None is `min_lr`."""
    param_groups: list[dict[str, Any]] = field(default_factory=list)
    """Settings of some parameters, the first entry that matches a name holds: {match: '*.router.*', lr_mult: 0.1,
    wd_mult: 0.0, max_lr: ..., min_lr: ..., start_wd: ..., end_wd: ...}. `*` stands for any letters, dots too. An entry
    that matches no trainable parameter is refused."""
    grad_norm_skip_threshold: float | None = None
    """A step whose gradient norm before clipping is above this updates nothing, counts as skipped and does not move the
    schedule; None, or infinity as in Megatron Bridge, skips none. It costs one wait for an accelerator at each step."""
    log_num_zeros_in_grad: bool = False
    """Count the exact zeros among the gradients of each step, after clipping."""


@dataclass
class SchedulerConfig(ConfigPart):
    """Learning rate and weight decay as a function of progress."""

    lr_decay_style: str = "linear"
    """constant | linear | cosine | inverse-square-root | WSD"""
    lr_wsd_decay_style: str = "exponential"
    """linear | cosine | exponential | minus_sqrt"""
    lr_decay_iters: int | None = None
    """Step at which the schedule ends; None is the run's last."""
    lr_decay_samples: int | None = None
    """The same in samples."""
    lr_wsd_decay_iters: int | None = None
    """Length of WSD's last phase in steps."""
    lr_wsd_decay_samples: int | None = None
    """The same in samples."""
    lr_warmup_fraction: float | None = None
    """Warm-up as a share of the schedule."""
    lr_warmup_iters: int = 0
    """Warm-up in steps, of which the schedule has more."""
    lr_warmup_samples: int = 0
    """Warm-up in samples, of which the schedule has more."""
    lr_warmup_init: float = 0.0
    """Learning rate at step 0 of the warm-up."""
    start_weight_decay: float | None = None
    """Weight decay at step 0; None is `optimizer.weight_decay`."""
    end_weight_decay: float | None = None
    """Weight decay at the end; None is `optimizer.weight_decay`."""
    weight_decay_incr_style: str = "constant"
    """constant | linear | cosine"""
    max_steps: int | None = None
    """Build the schedule for a run of this many steps (at least `train_iters`)."""
    override_opt_param_scheduler: bool = False
    """On resume, the configured schedule holds, whatever the checkpoint's was and `checkpoint.on_config_change` is."""
    use_checkpoint_opt_param_scheduler: bool = False
    """On resume, the checkpoint's schedule holds, whatever is configured and `checkpoint.on_config_change` is. With
    neither, a schedule that differs is refused with both values, unless `checkpoint.on_config_change=apply`."""
