"""The parts of a checkpoint that are neither model nor optimizer, each with a state of its own."""

from __future__ import annotations

import math
from typing import Any

from onstep.data import StepSource
from onstep.data.stream import is_stateful as is_stateful
from onstep.errors import CheckpointError
from onstep.events import Request
from onstep.events.control import FLAGS
from onstep.optim import OptimizerParamScheduler
from onstep.training.run import Run
from onstep.training.seams import Metrics, StateDict, UserScheduler


class RunProgress:
    """Counters, pending decisions and what the mean loss is made of: the same on all ranks.

    Of the log there is only its length, for a run that goes back, and the final metrics: the records are the journal's.
    """

    def __init__(self, state: Run) -> None:
        self._state = state

    def state_dict(self) -> StateDict:
        """Plain values, and Megatron Bridge's counters as 0-d tensors."""
        state = self._state
        return {
            "train_state": state.train_state.state_dict(),
            "flags": {flag: getattr(state.control, flag) for flag in FLAGS},
            "stopped_by": None if state.ending.stopped_by is None else vars(state.ending.stopped_by),
            "loss_sum": state.sums.loss_sum,
            "loss_steps": state.sums.loss_steps,
            "num_records": len(state.facts.log_history),
            "final_metrics": _final_metrics(state.facts.log_history),
            "last_metrics": dict(state.evaluated.last_metrics),
            "evaluated_at": state.evaluated.at_step,
            "epoch_is_open": state.stage.epoch_is_open,
            "was_concluded": state.stage.was_concluded,
        }

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Take everything over; a decided stop stays decided."""
        state = self._state
        state.train_state.load_state_dict(state_dict["train_state"])
        for flag, value in state_dict["flags"].items():
            if flag in FLAGS:
                state.control.__dict__[flag] = value
        asked = state_dict["stopped_by"]
        state.ending.stopped_by = None if asked is None else Request(**asked)
        state.sums.loss_sum, state.sums.loss_steps = state_dict["loss_sum"], state_dict["loss_steps"]
        history, final = state.facts.log_history, state_dict.get("final_metrics")
        if "log_history" in state_dict:  # as checkpoints before version 0.5 have it
            history[:] = state_dict["log_history"]
        num_records, step = state_dict.get("num_records", len(history)), state.train_state.step
        history[:] = [record for record in history[:num_records] if record["step"] <= step]
        if final is not None and not history:
            history.append(dict(final))
        state.evaluated.last_metrics, state.evaluated.at_step = state_dict["last_metrics"], state_dict["evaluated_at"]
        state.stage.epoch_is_open, state.stage.was_concluded = state_dict["epoch_is_open"], state_dict["was_concluded"]


def _final_metrics(history: list[dict[str, Any]]) -> dict[str, Any] | None:
    return next((dict(record) for record in reversed(history) if "train_runtime" in record), None)


class LoopParts:
    """What the loop itself remembers between steps, by name: the log interval, the anomaly watch, ..."""

    def __init__(self, parts: dict[str, Any]) -> None:
        self._parts = parts

    def state_dict(self) -> StateDict:
        """The states by name."""
        return {name: part.state_dict() for name, part in self._parts.items()}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Hand over what there is; a part that the checkpoint does not know starts anew."""
        for name, part in self._parts.items():
            if name in state_dict:
                part.load_state_dict(state_dict[name])


class SchedulerPosition:
    """Where a scheduler stands, and for our own, whether its schedule is the saved one (see its `load_state_dict`)."""

    def __init__(self, scheduler: UserScheduler) -> None:
        self._scheduler = scheduler

    def state_dict(self) -> StateDict:
        """The scheduler's own state."""
        state: dict[str, Any] = self._scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue at the saved count.

        Raises:
            ConfigError: our own is of another schedule, and nothing says which of the two holds.
        """
        if isinstance(self._scheduler, OptimizerParamScheduler):
            self._scheduler.num_steps = 0  # to which the saved count is added
        self._scheduler.load_state_dict(state_dict)


class DataPosition:
    """Where this rank's reader stands: (epoch, samples taken), and the state of a stateful iterable."""

    def __init__(self, reader: StepSource, state: Run) -> None:
        self._reader = reader
        self._state = state
        self.is_loaded = False

    def state_dict(self) -> StateDict:
        """The reader's own position after what was handed out."""
        return self._reader.state_dict()

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue there."""
        self._reader.load_state_dict(state_dict)
        self.is_loaded = True

    def seek(self) -> None:
        """Go to the position that the progress tells, which is the same for any number of ranks.

        A raw iterator stays where its own state brought it: it cannot seek.
        """
        if self.is_loaded and not self._reader.has_epochs:
            return
        progress = self._state.train_state
        self._reader.seek(progress.epoch, progress.samples_in_epoch)


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


def finite_numbers(metrics: Metrics) -> dict[str, float]:
    """The metrics that are numbers, as a manifest keeps them; NaN and infinity have no place in an order."""
    numbers = {key: value for key, value in metrics.items() if isinstance(value, (int, float))}
    return {key: float(value) for key, value in numbers.items() if math.isfinite(value)}
