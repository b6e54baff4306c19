"""Defines `RunState`, the `TrainerState` of a run in progress: a view of its counters, and the user's attributes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from onstep.events.control import Control
from onstep.events.log_history import LogHistory
from onstep.events.trainer_state import Record, TrainerState
from onstep.record.kinds import Kind
from onstep.train_state import StateDict, TrainState


class Tags(Protocol):
    """What collects Megatron Bridge's tags: `onstep.trackers.tag_record`."""

    def state_dict(self) -> StateDict: ...


@dataclass
class RunInfo:
    """Facts about the run that the view shows besides progress; set by the loop when a run starts."""

    max_steps: int = 0
    """Steps (optimizer updates) of the whole run."""
    num_train_epochs: float = 0
    """Epochs of the run, with the fraction of the last one."""
    steps_per_epoch: int | None = None
    """Steps of an epoch; None if the data has no length."""
    samples_per_epoch: int | None = None
    """Set with a batch-size ramp-up: epochs then have different numbers of steps, and `steps_per_epoch` is the number
    at the largest batch size."""
    micro_batches: tuple[int, int] | None = None
    """Those of a step and of an epoch on each rank, where they are what the fraction of an epoch counts, as in Hugging
    Face's records: an epoch may end within a step. None where it counts steps.
    """
    num_examples: int | None = None
    """Samples of the training data; None if it has no length."""
    num_train_samples: int | None = None
    """Samples that the whole run trains on, over all ranks and epochs."""
    logging_steps: int = 0
    """Steps between two logs."""
    eval_steps: int = 0
    """Steps between two evaluations."""
    save_steps: int = 0
    """Steps between two checkpoints."""
    shown_steps: dict[str, int] = field(default_factory=dict)
    """What callbacks see where the three are 0: as in Hugging Face, the intervals of the arguments, without effect."""
    train_batch_size: int = 0
    """Samples per micro-batch and rank."""
    max_eval_steps: int = -1
    """The greatest number of batches of an evaluation; -1 for all."""
    num_processes: int = 1
    """The number of ranks with samples of their own: all, unless some divide the model among them."""
    rank: int = 0
    """This rank, from 0."""
    local_rank: int = 0
    """This rank among those of its machine."""
    history: LogHistory = field(default_factory=LogHistory, repr=False)
    """The logged records so far."""
    bridge_tags: Tags | None = None
    """Megatron Bridge's tags since the metrics log's last record (`onstep.trackers.tag_record`); None if not
    collected.
    """

    @property
    def log_history(self) -> list[Record]:
        """Hugging Face's list of what was logged, which may be changed; of a resumed run, it is read when needed."""
        return self.history.records

    @log_history.setter
    def log_history(self, records: list[Record]) -> None:
        if records is not self.history.records:
            self.history.replace(records)


_COUNTED = "the loop counts it; keep a count of your own under another name, such as state.my_{name}"
_GIVEN = "set it in TrainingArguments before training"
REFUSED = {
    **{one.name: _GIVEN for one in dataclasses.fields(RunInfo)},
    "epoch": _COUNTED,
    "global_step": _COUNTED,
    "raw_epoch": _COUNTED,
    "epoch_start_step": _COUNTED,
    "epoch_train_steps": "it follows from the data and the batch size",
    "num_train_epochs": f"{_GIVEN}, or set state.max_steps",
    "train_batch_size": _GIVEN,
    "is_local_process_zero": "it follows from the rank",
    "is_world_process_zero": "it follows from the rank",
}
"""Names that callbacks cannot set, and what to do instead."""


def _requested(name: str, key: str, words: str) -> Any:
    """A number of steps that a callback may set: a request for a key, which shows at once where it was made.

    As in Hugging Face's loop, an interval has no effect where the strategy is not 'steps'.
    """

    def get(self: RunState) -> int:
        configured = getattr(self._info, name) or self._info.shown_steps.get(name, 0)
        configured = self._progress.user_attributes.get(name, configured)
        for request in reversed(self._control().requests):
            if request.flag == "set" and request.details["key"] == key:
                return int(request.details["value"])
        return int(self._progress.overrides.get(key, configured))

    def put(self: RunState, value: int) -> None:
        if not getattr(self._info, name) and name != "max_steps":
            self._progress.user_attributes[name] = value
        elif value != get(self):
            self._control().set(key, value, reason=f"state.{name} = {value!r}")

    return property(get, put, doc=words)


def _kept(name: str, words: str) -> Any:
    """A counter that a callback may set."""
    return property(
        lambda self: getattr(self._progress, name), lambda self, value: setattr(self._progress, name, value), doc=words
    )


def _of_user(name: str, default: object = None) -> Any:
    """A field that only users set."""
    return property(
        lambda self: self._progress.user_attributes.get(name, default),
        lambda self, value: self._progress.user_attributes.update({name: value}),
    )


class RunState(TrainerState):
    """The progress of a run with the fields of `transformers.TrainerState` and Forgather's additions.

    The counters show the run as it moves. Callbacks may set `best_metric`, `best_global_step`, `best_model_checkpoint`,
    `total_flos`, `num_input_tokens_seen` and `log_history`; setting `max_steps`, `logging_steps`, `eval_steps` or
    `save_steps` is a request to `control`, which holds on all ranks from the next step on. Every other name is an
    attribute of the user, which checkpoints save. A copy is a plain `TrainerState` with the current values.

    Args:
        progress: the counters.
        info: facts about the run.
        control: returns the run's control.
        stateful_callbacks: returns the states of the callbacks, and of the control, that are exportable.
        append: appends a line to the record of the run.
    """

    _progress: TrainState
    _info: RunInfo
    _control: Callable[[], Control]
    _exported: Callable[[], StateDict]
    _append: Callable[[Kind, Mapping[str, object]], None]

    def __init__(
        self,
        progress: TrainState,
        info: RunInfo,
        control: Callable[[], Control] | None = None,
        stateful_callbacks: Callable[[], StateDict] = dict,
        append: Callable[[Kind, Mapping[str, object]], None] = lambda kind, data: None,
    ) -> None:
        made = control if control is not None else _one_control()
        vars(self).update(_progress=progress, _info=info, _control=made, _exported=stateful_callbacks, _append=append)

    def __getattr__(self, name: str) -> Any:
        progress, info = self.__dict__.get("_progress"), self.__dict__.get("_info")
        if progress is not None and name in progress.user_attributes:
            return progress.user_attributes[name]
        if info is not None and not name.startswith("_") and hasattr(info, name):
            return getattr(info, name)
        raise AttributeError(f"TrainerState has no field {name!r}")

    def __setattr__(self, name: str, value: object) -> None:
        if name in _SETTABLE:
            object.__setattr__(self, name, value)
        elif name in REFUSED:
            remedy = REFUSED[name].format(name=name)
            raise AttributeError(f"state.{name} cannot be set during a run: {remedy}.")
        else:
            self._progress.user_attributes[name] = value

    def __delattr__(self, name: str) -> None:
        if name not in self._progress.user_attributes:
            raise AttributeError(f"state.{name} is not an attribute of yours, which alone can be deleted")
        del self._progress.user_attributes[name]

    def append_to_record(self, kind: Kind, data: Mapping[str, object]) -> None:
        """Append a line about the last step to the record of the run; on rank 0, if the run has a directory.

        Args:
            kind: the kind of the line.
            data: its fields by name, as JSON has them.
        """
        self._append(kind, data)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._progress.user_attributes]

    def __copy__(self) -> TrainerState:
        """The current values as a plain `TrainerState`."""
        values = {one.name: getattr(self, one.name) for one in dataclasses.fields(TrainerState)}
        copied = TrainerState(**values)
        facts = {name: value for name, value in vars(self._info).items() if name not in values and name != "history"}
        vars(copied).update(facts | {name: getattr(self, name) for name in _COMPUTED} | self._progress.user_attributes)
        return copied

    def __reduce__(self) -> tuple[object, ...]:
        """Copy deeply, and pickle, the current values as a plain `TrainerState`."""
        return _plain_state, (vars(self.__copy__()),)

    @property
    def global_step(self) -> int:  # type: ignore[override]
        """Optimizer steps completed."""
        return self._progress.step

    @property
    def epoch(self) -> float:  # type: ignore[override]
        """Epochs completed, including the fraction of the current one if its length is known."""
        steps, samples = self._info.steps_per_epoch, self._info.samples_per_epoch
        if samples:
            return self._progress.epoch + self._progress.samples_in_epoch / samples
        if self._info.micro_batches is not None:
            of_step, of_epoch = self._info.micro_batches
            return self._progress.epoch + min(self._progress.steps_in_epoch * of_step, of_epoch) / of_epoch
        return self._progress.epoch + (self._progress.steps_in_epoch / steps if steps else 0.0)

    @property
    def raw_epoch(self) -> int:
        """Full epochs completed."""
        return self._progress.epoch

    @property
    def epoch_start_step(self) -> int:
        """The step at which the current epoch began."""
        return self._progress.step - self._progress.steps_in_epoch

    @property
    def epoch_train_steps(self) -> int | None:
        """Optimizer steps per epoch; None if the data has no length."""
        return self._info.steps_per_epoch

    @property
    def num_train_epochs(self) -> int:  # type: ignore[override]
        """Epochs that the run begins."""
        return math.ceil(self._info.num_train_epochs)

    @property
    def train_batch_size(self) -> int:  # type: ignore[override]
        """Samples per micro-batch and rank."""
        return self._info.train_batch_size

    @property
    def num_input_tokens_seen(self) -> int:
        """Input tokens if they are counted, else labels trained on, over all ranks; updated at logged steps."""
        counted = self._progress.num_input_tokens_seen
        return self._progress.consumed_tokens if counted is None else counted

    @num_input_tokens_seen.setter
    def num_input_tokens_seen(self, value: int) -> None:
        self._progress.num_input_tokens_seen = int(value)  # from a tensor too, since it is saved

    @property
    def is_world_process_zero(self) -> bool:  # type: ignore[override]
        """Whether this is rank 0."""
        return self._info.rank == 0

    @property
    def is_local_process_zero(self) -> bool:  # type: ignore[override]
        """Whether this is the first rank of its node."""
        return self._info.local_rank == 0

    max_steps = _requested("max_steps", "train_iters", "Optimizer steps of the run; set it to end training there.")
    logging_steps = _requested("logging_steps", "log_interval", "Steps between two logged ones.")
    eval_steps = _requested("eval_steps", "eval_interval", "Steps between two evaluations.")
    save_steps = _requested("save_steps", "save_interval", "Steps between two checkpoints.")

    best_metric = _kept("best_metric", "Best value of `metric_for_best_model` so far.")
    best_global_step = _kept("best_step", "Step at which `best_metric` was reached.")
    best_model_checkpoint = _kept("best_model_checkpoint", "Directory of the best checkpoint; None until there is one.")
    total_flos = _kept("floating_point_operations_so_far", "Floating-point operations so far, of logged steps.")

    is_hyper_param_search = _of_user("is_hyper_param_search", False)
    trial_name = _of_user("trial_name")
    trial_params = _of_user("trial_params")

    @property
    def log_history(self) -> list[Record]:
        """What was logged, in order; of a resumed run, it is read when needed."""
        return self._info.log_history

    @log_history.setter
    def log_history(self, records: list[Record]) -> None:
        self._info.log_history = records

    @property
    def stateful_callbacks(self) -> StateDict:
        """The current state of each `ExportableState`, and of the control, by class name."""
        given: StateDict | None = self._progress.user_attributes.get("stateful_callbacks")
        return self._exported() if given is None else given

    @stateful_callbacks.setter
    def stateful_callbacks(self, states: StateDict) -> None:
        self._progress.user_attributes["stateful_callbacks"] = states


_SETTABLE = {name for name, one in vars(RunState).items() if isinstance(one, property) and one.fset is not None}
_COMPUTED = ("raw_epoch", "epoch_start_step", "epoch_train_steps")


def _plain_state(attributes: StateDict) -> TrainerState:
    state = TrainerState()
    vars(state).update(attributes)
    return state


def _one_control() -> Callable[[], Control]:
    control = Control()
    return lambda: control
