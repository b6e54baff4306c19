"""Adds the learning rate of every parameter group to the logs."""

from __future__ import annotations

from collections import Counter

from onstep.events import RunState, TrainerCallback
from onstep.events.views import OptimizerView
from onstep.record.kinds import Metrics


class LearningRateMonitor(TrainerCallback):
    """Adds each parameter group's learning rate to the logs as ``learning_rate/<group>``.

    A group is named by its entry "name", or else by its index; the second of two groups with the same name is
    ``<name>-2``. A single unnamed group gets no extra key: its rate is `learning_rate`, which is always logged.
    Momentum and weight decay follow the same rule, except that a single group's are logged as `momentum` and
    `weight_decay`. The values are read from the optimizer when a step is logged, so they are those of the next step.

    Args:
        log_momentum: Also log ``momentum/<group>``: the group's momentum, or its first beta.
        log_weight_decay: Also log ``weight_decay/<group>``.
    """

    reads_weights = False
    ranks = "main"

    def __init__(self, log_momentum: bool = False, log_weight_decay: bool = False) -> None:
        self.log_momentum = log_momentum
        self.log_weight_decay = log_weight_decay

    def on_log_step(
        self,
        args: object,
        state: RunState,
        control: object,
        logs: Metrics,
        optimizer: OptimizerView | None = None,
        **kwargs: object,
    ) -> None:
        """Add the values to `logs`."""
        if optimizer is None or not state.is_world_process_zero:
            return
        groups = [group for group in optimizer.param_groups if group.get("params")]
        is_single = len(groups) == 1 and "name" not in groups[0]
        seen: Counter[str] = Counter()
        for number, group in enumerate(groups):
            name = str(group.get("name", number))
            seen[name] += 1
            ending = f"/{name}" if seen[name] == 1 else f"/{name}-{seen[name]}"
            if is_single:
                ending = ""
            else:
                logs[f"learning_rate{ending}"] = float(group["lr"])
            momentum = group.get("momentum", (group.get("betas") or [None])[0])
            if self.log_momentum and momentum is not None:
                logs[f"momentum{ending}"] = float(momentum)
            if self.log_weight_decay and "weight_decay" in group:
                logs[f"weight_decay{ending}"] = float(group["weight_decay"])
