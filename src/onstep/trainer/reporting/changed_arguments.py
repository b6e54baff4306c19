"""Warns of arguments that user code changes in the middle of a training, which has read them at its start."""

from __future__ import annotations

import logging
from collections.abc import Callable

from onstep.config.hf.argument import KEY_OF
from onstep.errors import warn_once

logger = logging.getLogger(__name__)

_READ_AT_THE_START = (
    *(name for name in KEY_OF if name not in ("logging_dir", "control")),
    *("gradient_accumulation_steps", "max_grad_norm", "max_steps", "num_train_epochs", "lr_scheduler_type"),
    *("warmup_steps", "warmup_ratio", "optim", "train_sampling_strategy", "save_total_limit", "save_only_model"),
    *("lr_scheduler_kwargs", "optim_args", "optim_target_modules", "bf16", "fp16", "gradient_checkpointing"),
    *("use_cache", "label_smoothing_factor", "neftune_noise_alpha", "use_liger_kernel", "auto_find_batch_size"),
    *("run_name", "report_to", "logging_nan_inf_filter", "include_num_input_tokens_seen"),
    *("logging_strategy", "logging_steps", "eval_strategy", "eval_steps", "eval_delay", "save_strategy", "save_steps"),
)
_INSTEAD = {name: f"state.{name}" for name in ("max_steps", "logging_steps", "eval_steps", "save_steps")} | {
    "learning_rate": "'lr' in the optimizer's param_groups, or the scheduler",
    "weight_decay": "'weight_decay' in the optimizer's param_groups",
    "logging_strategy": "control.should_log",
    "eval_strategy": "control.should_evaluate",
    "save_strategy": "control.should_save",
    "num_train_epochs": "state.max_steps",
}
"""What a callback sets in mid-training in place of an argument."""


def watched_arguments(*owners: object) -> Callable[[], None]:
    """A function that warns of each argument of these objects that has changed since; called at logged steps."""
    before = [_read(owner) for owner in owners]

    def check() -> None:
        for owner, values in zip(owners, before, strict=True):
            now = _read(owner)
            for name in [] if now == values else values:
                if now[name] != values[name]:
                    instead = f"set {_INSTEAD[name]}" if name in _INSTEAD else "start another training with it"
                    warn_once(
                        logger,
                        f"args.{name} was changed from {values[name]!r} to {now[name]!r} during the training, which "
                        f"has read it at its start, so that has no effect; {instead}",
                    )

    return check


def _read(owner: object) -> dict[str, object]:
    values = vars(owner)
    return {name: values.get(name) for name in _READ_AT_THE_START}
