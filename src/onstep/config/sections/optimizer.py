"""The optimizer, and the schedules of learning rate and weight decay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from onstep.config.section import (
    FOLLOWS_SCHEDULE,
    INCOMPATIBLE,
    INITIAL_ONLY,
    SAFE,
    TRAJECTORY,
    Bound,
    ConfigSection,
    option,
)

_NS_STEPS = Bound("from 1 to 99, the most that torch's Muon allows; 5 is usual", lambda steps: 1 <= steps <= 99)
_ADAM = "optimizer.optimizer other than sgd"
_MUON = "optimizer.optimizer=muon"
_PRECISION_AWARE = "optimizer.use_precision_aware_optimizer=true"
_WSD = "scheduler.lr_decay_style=WSD"
_DYNAMIC_SCALE = ("mixed_precision=fp16_mixed", "optimizer.loss_scale=null")
_DECAY = "scheduler.lr_decay_style other than constant"
_FRACTION = Bound("between 0 and 1", lambda share: 0 <= share <= 1)

OF_BITSANDBYTES = (
    *("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "paged_adamw_32bit"),
    *("lion_8bit", "lion_32bit", "paged_lion_8bit", "paged_lion_32bit"),
    *("ademamix", "ademamix_8bit", "paged_ademamix_8bit", "paged_ademamix_32bit"),
)
OF_TORCHAO = ("adamw_torch_8bit", "adamw_torch_4bit")
OF_PACKAGES = (*OF_BITSANDBYTES, *OF_TORCHAO)
"""Optimizers of other packages, by transformers' names."""


@dataclass
class OptimizerConfig(ConfigSection):
    """The optimizer: AdamW (`adam`), `sgd`, `muon`, or one with quantized state."""

    optimizer: str = option(
        "adam",
        INCOMPATIBLE,
        choices=("adam", "sgd", "muon", *OF_PACKAGES),
        common=True,
        known_as=("optim",),
        help="Algorithm: adam (AdamW) | sgd | muon (torch's Muon for the matrices of the layers; AdamW for "
        "embeddings, output, biases, norms and stacked weights of experts) | one of bitsandbytes or torchao by its "
        "name in transformers, such as adamw_8bit, paged_adamw_8bit, paged_adamw_32bit, adamw_torch_8bit, "
        "adamw_torch_4bit.",
    )
    lr: float | None = option(
        None,
        TRAJECTORY,
        bound=">= 0",
        part_of_schedule=True,
        effect=FOLLOWS_SCHEDULE,
        hf="learning_rate",
        common=True,
        help="Peak learning rate.",
    )
    min_lr: float | None = option(
        None,
        TRAJECTORY,
        bound=">= 0",
        part_of_schedule=True,
        effect=FOLLOWS_SCHEDULE,
        common=True,
        needs=_DECAY,
        help="Learning rate at the end of the schedule; None is 0.",
    )
    weight_decay: float = option(
        0.01,
        TRAJECTORY,
        bound=">= 0",
        part_of_schedule=True,
        hf="weight_decay",
        common=True,
        help="Decoupled weight decay of matrices; vectors are not decayed.",
    )
    adam_beta1: float = option(
        0.9,
        TRAJECTORY,
        bound="at least 0 and below 1",
        hf="adam_beta1",
        needs=_ADAM,
        help="Decay rate of Adam's first moment.",
    )
    adam_beta2: float = option(
        0.999,
        TRAJECTORY,
        bound="at least 0 and below 1",
        hf="adam_beta2",
        needs=_ADAM,
        help="Decay rate of Adam's second moment.",
    )
    adam_eps: float = option(
        1e-8,
        TRAJECTORY,
        bound="> 0",
        hf="adam_epsilon",
        needs=_ADAM,
        help="Epsilon in the denominator of Adam's update.",
    )
    sgd_momentum: float = option(
        0.9, TRAJECTORY, bound="at least 0 and below 1", needs="optimizer.optimizer=sgd", help="Momentum of SGD."
    )
    clip_grad: float | None = option(
        1.0,
        TRAJECTORY,
        bound=">= 0",
        known_as=("max_grad_norm", "grad_clip", "gradient_clip_val"),
        common=True,
        help="Largest global gradient norm; None or 0 disables clipping.",
    )
    params_dtype: str = option(
        "float32",
        INCOMPATIBLE,
        choices=("float32", "bfloat16"),
        known_as=("param_dtype", "torch_dtype"),
        help="Type of the trained weights and of their gradients: float32 | bfloat16.",
    )
    main_params_dtype: str = option(
        "float32",
        INCOMPATIBLE,
        choices=("float32", "bfloat16"),
        only_with="optimizer.params_dtype=bfloat16",
        known_as=("master_dtype", "master_weights"),
        help="Precision in which bfloat16 weights are updated: float32 (the optimizer keeps the 16 bits that bfloat16 "
        "lacks, and its state in float32) | bfloat16 (no master weights, state in bfloat16).",
    )
    use_precision_aware_optimizer: bool = option(
        False,
        INCOMPATIBLE,
        needs="optimizer.exp_avg_dtype=bfloat16 or optimizer.exp_avg_sq_dtype=bfloat16",
        help="Let the averages of AdamW have types of their own: exp_avg_dtype and exp_avg_sq_dtype.",
    )
    exp_avg_dtype: str = option(
        "float32",
        INCOMPATIBLE,
        choices=("float32", "bfloat16"),
        only_with=_PRECISION_AWARE,
        help="Type of AdamW's average of gradients: float32 | bfloat16 (rounded stochastically).",
    )
    exp_avg_sq_dtype: str = option(
        "float32",
        INCOMPATIBLE,
        choices=("float32", "bfloat16"),
        only_with=_PRECISION_AWARE,
        help="Type of AdamW's average of their squares: float32 | bfloat16 (rounded stochastically).",
    )
    rounding: str = option(
        "stochastic",
        TRAJECTORY,
        choices=("stochastic", "kahan", "nearest"),
        only_with="optimizer.main_params_dtype=bfloat16",
        help="How updates of bfloat16 weights without master weights are rounded: stochastic | kahan (2 bytes per "
        "weight hold what rounding would lose) | nearest (small updates are lost).",
    )
    loss_scale: float | None = option(
        None,
        TRAJECTORY,
        bound="> 0",
        needs="mixed_precision",
        help="Constant loss scale for float16 and bfloat16; None scales float16 dynamically and bfloat16 not at all.",
    )
    initial_loss_scale: float = option(
        2.0**32, TRAJECTORY, bound="> 0", effect=INITIAL_ONLY, needs=_DYNAMIC_SCALE, help="Initial dynamic loss scale."
    )
    min_loss_scale: float = option(
        1.0,
        TRAJECTORY,
        bound="> 0",
        needs=_DYNAMIC_SCALE,
        help="Smallest dynamic loss scale; an overflow at this scale is an anomaly.",
    )
    loss_scale_window: int = option(
        1000,
        TRAJECTORY,
        bound="> 0",
        needs=_DYNAMIC_SCALE,
        help="Steps without overflow after which the dynamic loss scale doubles.",
    )
    hysteresis: int = option(
        2, TRAJECTORY, bound="> 0", needs=_DYNAMIC_SCALE, help="Overflows after which the dynamic loss scale halves."
    )
    muon_momentum: float = option(
        0.95, TRAJECTORY, bound="at least 0 and below 1", only_with=_MUON, help="Momentum of Muon."
    )
    muon_nesterov: bool = option(True, TRAJECTORY, only_with=_MUON, help="Use Nesterov momentum in Muon.")
    muon_num_ns_steps: int = option(
        5,
        TRAJECTORY,
        bound=_NS_STEPS,
        only_with=_MUON,
        help="Newton-Schulz iterations that orthogonalize an update of Muon.",
    )
    muon_fp32_matmul_prec: str = option(
        "medium",
        TRAJECTORY,
        choices=("medium", "highest"),
        only_with=_MUON,
        help="Precision of these iterations: medium (bfloat16, to the bit torch's) | highest (float32, or TF32 with "
        "train.tf32; slower, and the same on any number of ranks to 1e-6).",
    )
    muon_adjust_lr_fn: str = option(
        "match_rms_adamw",
        TRAJECTORY,
        choices=("match_rms_adamw", "original"),
        only_with=_MUON,
        help="How Muon's learning rate derives from `lr`: match_rms_adamw (updates as large as AdamW's) | original.",
    )
    decoupled_lr: float | None = option(
        None,
        TRAJECTORY,
        bound="> 0",
        part_of_schedule=True,
        effect=f"{FOLLOWS_SCHEDULE}; it cannot be set or unset",
        help="Peak learning rate of the embedding and output matrices, which become parameter groups of their own "
        "(`is_decoupled_lr`); None is `lr`.",
    )
    decoupled_min_lr: float | None = option(
        None,
        TRAJECTORY,
        bound=">= 0",
        part_of_schedule=True,
        effect=f"{FOLLOWS_SCHEDULE}; it cannot be set or unset",
        needs=_DECAY,
        help="Their learning rate at the end of the schedule; None is `min_lr`.",
    )
    param_groups: list[dict[str, Any]] = option(
        [],
        INCOMPATIBLE,
        help="Settings for parameters by name: {match: '*.router.*', lr_mult: 0.1, wd_mult: 0.0, max_lr: ..., "
        "min_lr: ..., start_wd: ..., end_wd: ...}. The first entry that matches applies; `*` matches any "
        "characters, dots too. An entry that matches no trainable parameter is refused.",
    )
    grad_norm_skip_threshold: float | None = option(
        None,
        TRAJECTORY,
        bound="> 0",
        may_be_infinite=True,
        help="Skip the update of a step whose gradient norm before clipping exceeds this: it counts as skipped and "
        "does not advance the schedule. None, or infinity as in Megatron Bridge, skips none. Costs one wait "
        "for an accelerator per step.",
    )
    log_num_zeros_in_grad: bool = option(
        False, SAFE, help="Count the exact zeros among the gradients of each step, after clipping."
    )


@dataclass
class SchedulerConfig(ConfigSection):
    """Learning rate and weight decay as a function of progress."""

    CHANGE_EFFECT = FOLLOWS_SCHEDULE
    PART_OF_SCHEDULE = True

    lr_decay_style: str = option(
        "linear",
        TRAJECTORY,
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
        common=True,
        known_as=("lr_scheduler_type", "lr_scheduler"),
        help="Shape of the schedule: constant | linear | cosine | inverse-square-root | WSD (warm-up, stable, decay).",
    )
    lr_wsd_decay_style: str = option(
        "exponential",
        TRAJECTORY,
        choices=("linear", "cosine", "exponential", "minus_sqrt"),
        needs=_WSD,
        help="Shape of WSD's last phase: linear | cosine | exponential | minus_sqrt.",
    )
    lr_decay_iters: int | None = option(
        None,
        TRAJECTORY,
        bound="> 0",
        needs=f"{_DECAY} or scheduler.lr_warmup_fraction",
        help="Step at which the schedule ends; None is the last step of the run.",
    )
    lr_decay_samples: int | None = option(
        None,
        TRAJECTORY,
        bound="> 0",
        needs=f"{_DECAY} or scheduler.lr_warmup_fraction",
        help="Sample at which the schedule ends, in a run by samples.",
    )
    lr_wsd_decay_iters: int | None = option(
        None, TRAJECTORY, bound="> 0", needs=_WSD, help="Length of WSD's last phase in steps."
    )
    lr_wsd_decay_samples: int | None = option(
        None, TRAJECTORY, bound="> 0", needs=_WSD, help="Length of WSD's last phase in samples."
    )
    lr_warmup_fraction: float | None = option(
        None,
        TRAJECTORY,
        bound=_FRACTION,
        common=True,
        known_as=("warmup_ratio",),
        help="Length of the warm-up as a fraction of the schedule.",
    )
    lr_warmup_iters: int = option(
        0,
        TRAJECTORY,
        bound=">= 0",
        known_as=("warmup_steps", "warmup_iters"),
        common=True,
        help="Length of the warm-up in steps; must be shorter than the schedule.",
    )
    lr_warmup_samples: int = option(
        0, TRAJECTORY, bound=">= 0", help="Length of the warm-up in samples; must be shorter than the schedule."
    )
    lr_warmup_init: float = option(
        0.0,
        TRAJECTORY,
        bound=">= 0",
        needs="a warm-up: scheduler.lr_warmup_iters or scheduler.lr_warmup_fraction or scheduler.lr_warmup_samples",
        help="Learning rate at the start of the warm-up.",
    )
    start_weight_decay: float | None = option(
        None, TRAJECTORY, bound=">= 0", help="Weight decay at step 0; None is `optimizer.weight_decay`."
    )
    end_weight_decay: float | None = option(
        None,
        TRAJECTORY,
        bound=">= 0",
        help="Weight decay at the end of the schedule; None is `optimizer.weight_decay`.",
    )
    weight_decay_incr_style: str = option(
        "constant",
        TRAJECTORY,
        choices=("constant", "linear", "cosine"),
        help="How the weight decay rises: constant | linear | cosine.",
    )
    max_steps: int | None = option(
        None, TRAJECTORY, bound="> 0", help="Plan the schedule for a run of this many steps (at least `train_iters`)."
    )
    override_opt_param_scheduler: bool = option(
        False,
        SAFE,
        help="On resume, use the configured schedule, whatever the checkpoint's and `checkpoint.on_config_change` are.",
    )
    use_checkpoint_opt_param_scheduler: bool = option(
        False,
        SAFE,
        help="On resume, use the checkpoint's schedule, whatever the configuration and "
        "`checkpoint.on_config_change` are. With neither, a schedule that differs is refused with both "
        "values, unless `checkpoint.on_config_change=apply`.",
    )
