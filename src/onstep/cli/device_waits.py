"""Lists the reasons for which the host waits for an accelerator in a step that is not logged, evaluated or saved."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from onstep.config import ConfigContainer


@dataclass(frozen=True)
class DeviceWait:
    """A reason to wait. All other steps are queued on the device without waiting for it."""

    what: str
    """Keys, or an object that a script supplies."""
    times: str
    """How often the host waits in a step."""
    why: str
    answer: Callable[[ConfigContainer], bool | str]
    """Whether a configuration makes the host wait; or what decides that."""


def _has_threshold(config: ConfigContainer) -> bool:
    threshold = config.optimizer.grad_norm_skip_threshold
    return threshold is not None and threshold != math.inf


def _reads_losses(config: ConfigContainer) -> bool:
    return config.train.on_nonfinite in ("skip", "rollback") or config.anomaly.on_spike != "ignore"


def _has_dynamic_scale(config: ConfigContainer) -> bool:
    return config.mixed_precision == "fp16_mixed" and config.optimizer.loss_scale is None


def _may_loop_over_experts(config: ConfigContainer) -> bool | str:
    has_experts = config.model.num_moe_experts is not None and config.mixed_precision != "bf16_mixed"
    return "model" if has_experts else False


DEVICE_WAITS = (
    DeviceWait(
        "`train.on_nonfinite` skip or rollback, `anomaly.on_spike`",
        "once",
        "an update that is left out does not advance the schedule, and its samples are skipped: both are on the host",
        _reads_losses,
    ),
    DeviceWait(
        "`optimizer.grad_norm_skip_threshold`",
        "once, together with the policies above",
        "an update that is left out does not advance the schedule",
        _has_threshold,
    ),
    DeviceWait(
        "`mixed_precision=fp16_mixed` without `optimizer.loss_scale`",
        "once, together with the others except `anomaly.on_spike`",
        "the scale is on the host, and an overflow does not advance the schedule",
        _has_dynamic_scale,
    ),
    DeviceWait(
        "an optimizer of Megatron-Core's convention",
        "once, together with the policies above",
        "its `step()` decides on the host whether to update, so it must not be called in vain",
        lambda config: "script",
    ),
    DeviceWait(
        "an optimizer that is not torch's, or with hooks on its step",
        "once, together with the policies above",
        "what it changes is unknown, so the device cannot undo it; those of bitsandbytes also wait for each parameter",
        lambda config: "script",
    ),
    DeviceWait(
        "experts in float32 or float16",
        "once for each layer and forward pass, if their products are large",
        "torch groups only bfloat16 on a GPU, and to pad large products costs more than to wait for the loads",
        _may_loop_over_experts,
    ),
    DeviceWait(
        "a model of transformers whose inputs have an `attention_mask`",
        "twice for each forward pass",
        "transformers looks whether it masks anything; leave it out where nothing is padded",
        lambda config: "script",
    ),
    DeviceWait(
        "`rerun_state_machine.rerun_mode`",
        "once",
        "each result is validated before the next step",
        lambda config: config.rerun_state_machine.rerun_mode != "disabled",
    ),
    DeviceWait(
        "`logger.timing_log_level` 1 or 2",
        "at the start and end of each phase",
        "it measures work, not the time to queue it",
        lambda config: config.logger.timing_log_level > 0,
    ),
    DeviceWait(
        "`train.train_sync_interval`",
        "once in each interval",
        "the key exists for that",
        lambda config: bool(config.train.train_sync_interval),
    ),
)
