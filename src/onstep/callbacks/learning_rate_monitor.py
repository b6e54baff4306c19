"""Adds the learning rate of every parameter group to what is logged."""

from __future__ import annotations

from collections import Counter
from typing import Any

from onstep.events import TrainerCallback


class LearningRateMonitor(TrainerCallback):
    """Puts each parameter group's learning rate into the logs, under ``learning_rate/<group>``.

    A group's name is its entry "name", else its number; of two groups with one name the second is ``<name>-2``. A
    single group without a name has no key of its own: its rate is `learning_rate`, which is logged anyway. Momentum and
    weight decay follow the same rule, except that a single group's are logged as `momentum` and `weight_decay`. The
    values are read from the optimizer when a step is logged: those that the next step uses.

    Args:
        log_momentum: Also log ``momentum/<group>``: the group's momentum, or the first of its betas.
        log_weight_decay: Also log ``weight_decay/<group>``.
    """

    ranks = "main"

    def __init__(self, log_momentum: bool = False, log_weight_decay: bool = False) -> None:
        self.log_momentum = log_momentum
        self.log_weight_decay = log_weight_decay

    def on_log_step(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any], optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Add the values to the step that is being logged."""
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
