"""The parts of a checkpoint that are neither model nor optimizer, each with a state of its own."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from onstep.data import IteratorReader
from onstep.errors import CheckpointError
from onstep.events import Request
from onstep.events.control import FLAGS
from onstep.optim import OptimizerParamScheduler

if TYPE_CHECKING:
    from onstep.training.state import GlobalState


class RunProgress:
    """Counters, pending decisions, the log so far and what the mean loss is made of: the same on all ranks."""

    def __init__(self, state: GlobalState) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        """Plain values, and Megatron Bridge's counters as 0-d tensors."""
        state = self._state
        return {
            "train_state": state.train_state.state_dict(),
            "flags": {flag: getattr(state.control, flag) for flag in FLAGS},
            "stopped_by": None if state.stopped_by is None else vars(state.stopped_by),
            "loss_sum": state.loss_sum,
            "loss_steps": state.loss_steps,
            "log_history": [dict(record) for record in state.facts.log_history],
            "last_metrics": dict(state.last_metrics),
            "evaluated_at": state.evaluated_at,
            "epoch_is_open": state.epoch_is_open,
            "was_concluded": state.was_concluded,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take everything over; a decided stop stays decided."""
        state = self._state
        state.train_state.load_state_dict(state_dict["train_state"])
        for flag, value in state_dict["flags"].items():
            if flag in FLAGS:
                state.control.__dict__[flag] = value
        asked = state_dict["stopped_by"]
        state.stopped_by = None if asked is None else Request(**asked)
        state.loss_sum, state.loss_steps = state_dict["loss_sum"], state_dict["loss_steps"]
        state.facts.log_history[:] = state_dict["log_history"]
        state.last_metrics, state.evaluated_at = state_dict["last_metrics"], state_dict["evaluated_at"]
        state.epoch_is_open, state.was_concluded = state_dict["epoch_is_open"], state_dict["was_concluded"]


class LoopParts:
    """What the loop itself remembers between steps, by name: the log interval, the anomaly watch, ..."""

    def __init__(self, parts: dict[str, Any]) -> None:
        self._parts = parts

    def state_dict(self) -> dict[str, Any]:
        """The states by name."""
        return {name: part.state_dict() for name, part in self._parts.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Hand over what there is; a part that the checkpoint does not know starts anew."""
        for name, part in self._parts.items():
            if name in state_dict:
                part.load_state_dict(state_dict[name])


class SchedulerPosition:
    """Where a scheduler stands, and for our own, whether its schedule is the saved one (see its `load_state_dict`)."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's own state."""
        state: dict[str, Any] = self._scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at the saved count.

        Raises:
            ConfigError: our own is of another schedule, and nothing says which of the two holds.
        """
        if isinstance(self._scheduler, OptimizerParamScheduler):
            self._scheduler.num_steps = 0  # to which the saved count is added
        self._scheduler.load_state_dict(state_dict)


class DataPosition:
    """Where this rank's reader stands: (epoch, samples taken), and the state of a stateful iterable."""

    def __init__(self, reader: Any, state: GlobalState) -> None:
        self._reader = reader
        self._state = state
        self.is_loaded = False

    def state_dict(self) -> dict[str, Any]:
        """The reader's own position after what was handed out."""
        position: dict[str, Any] = self._reader.state_dict()
        return position

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue there."""
        self._reader.load_state_dict(state_dict)
        self.is_loaded = True

    def seek(self) -> None:
        """Go to the position that the progress tells, which is the same for any number of ranks.

        A raw iterator stays where its own state brought it: it cannot seek.
        """
        if self.is_loaded and isinstance(self._reader, IteratorReader):
            return
        progress = self._state.train_state
        self._reader.seek(progress.epoch, progress.samples_in_epoch)


def is_stateful(owner: Any) -> bool:
    """Whether an object has a state that can be saved and loaded; a class or a module of code has none of its own."""
    methods = (getattr(owner, "state_dict", None), getattr(owner, "load_state_dict", None))
    return not isinstance(owner, type) and all(callable(one) for one in methods)


def check_has_state(what: str, owner: Any, remedy: str) -> None:
    """Refuse what a checkpoint could not hold, before anything is trained.

    Raises:
        CheckpointError: naming it and the way out.
    """
    if not is_stateful(owner):
        raise CheckpointError(
            f"the {what} {type(owner).__name__} has no state_dict and load_state_dict, so no checkpoint can hold it; "
            f"{remedy}."
        )


def finite_numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """The metrics that are numbers, as a manifest keeps them; NaN and infinity have no place in an order."""
    numbers = {key: value for key, value in metrics.items() if isinstance(value, (int, float))}
    return {key: float(value) for key, value in numbers.items() if math.isfinite(value)}
