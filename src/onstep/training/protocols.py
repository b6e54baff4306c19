"""Defines the types at the interfaces of the training layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, TypeGuard

from torch import nn

from onstep.data import Batch, EvalLoader
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
