"""Defines the types at the interfaces of the training layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeGuard

from torch import nn

from onstep.checkpoint import CheckpointInfo, CheckpointManager, StateComponent
from onstep.data import Batch, EvalLoader, StepSource
from onstep.data.loaders.iterable_loader import is_stateful
from onstep.optim.protocol import HasParamGroups, HasState, ParamScheduler
from onstep.record.kinds import Metrics as Metrics
from onstep.train_state import StateDict as StateDict

ForwardStep = Callable[..., tuple[object, Callable[..., object]]]
"""`forward_step(data_iterator, model)`, optionally with the state first and `return_schedule_plan` last; returns
`(output, loss_function)`."""


class UserOptimizer(HasParamGroups, HasState, Protocol):
    """An optimizer as callbacks and checkpoints see it: Onstep's, torch's, or one with Megatron-Core's interface."""


UserScheduler = ParamScheduler
"""A learning-rate schedule: Onstep's, or an adapter of torch's."""


class Trained(NamedTuple):
    """The objects that a training changes, as checkpoints see them."""

    model: list[nn.Module]
    optimizer: UserOptimizer | None
    scheduler: UserScheduler | None


class Checkpoints(Protocol):
    """The interface of a run's checkpoints that the loop uses: `checkpointing.writing.RunCheckpoints`."""

    saved_mark: tuple[object, ...] | None
    """The `mark` of the newest checkpoint, or of the start of the training; None before both."""
    failure: str | None
    """Why the newest checkpoint or the final weights could not be written, if the run continued all the same
    (`checkpoint.on_save_error=continue`)."""
    some_rank_writes: bool
    """Whether a rank is still writing its files of an asynchronous save, as last agreed."""

    @property
    def is_writing(self) -> bool: ...
    @property
    def is_saving(self) -> bool: ...
    @property
    def root(self) -> Path: ...
    @property
    def manager(self) -> CheckpointManager: ...
    @property
    def start(self) -> CheckpointInfo | None: ...
    @property
    def is_chosen_start(self) -> bool: ...
    @property
    def is_loaded(self) -> bool: ...
    def check_states(self, trained: Trained) -> None: ...
    def load_progress(self, trained: Trained) -> None: ...
    def load_features(self) -> None: ...
    def load_position(self, reader: StepSource, scheduler: UserScheduler | None = None) -> None: ...
    def to_go_back_to(self, max_step: int, went_to: int | None, branch: int) -> CheckpointInfo | None: ...
    def restore(self, info: CheckpointInfo, trained: Trained) -> None: ...
    def save(
        self, trained: Trained, reader: StepSource, persistent: bool = True, adopts: bool = False, reason: str = ""
    ) -> None: ...
    def save_in_memory(self, trained: Trained, reader: StepSource | None) -> None: ...
    def read(self, info: CheckpointInfo, components: Sequence[StateComponent]) -> None: ...
    def load_best_model(self, model: list[nn.Module]) -> None: ...
    def finalize_if_written(self) -> None: ...
    def finish(self) -> None: ...


DataSource = EvalLoader | Iterator[Batch] | list[Iterator[Batch]] | None
"""Input of an evaluation; a list has one iterator of micro-batches, None is for a forward step that needs no data."""

NonLossFunction = Callable[..., object]
"""A user's function that collects or displays evaluation data other than losses."""

Loggers = Mapping[str, Any]
"""Objects that receive metrics, by the name of their tracker: each has the methods of its own client."""

Values = Mapping[str, Any]
"""Numbers and tensors of one element by name, possibly not yet read from the device."""


def has_state(owner: object) -> TypeGuard[HasState]:
    """Whether an object has a state that can be saved and loaded; classes and modules have none."""
    return is_stateful(owner)
