"""Types of what the training layer meets at its seams, named once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, TypeGuard

from torch import nn

from onstep.data import Batch, EvalLoader
from onstep.data.loaders.iterable_loader import is_stateful
from onstep.optim.protocol import HasParamGroups, HasState, ParamScheduler

StateDict = dict[str, Any]
"""What a `state_dict()` gives: tensors, numbers, texts, and containers of these."""

Metrics = dict[str, Any]
"""A record of the log by name: numbers, and what callbacks add."""

ForwardStep = Callable[..., tuple[object, Callable[..., object]]]
"""`forward_step(data_iterator, model)`, optionally with the state first and `return_schedule_plan` last; gives
`(output, loss_function)`."""


class UserOptimizer(HasParamGroups, HasState, Protocol):
    """An optimizer as callbacks and checkpoints know it: ours, torch's, or one of Megatron-Core's convention."""


UserScheduler = ParamScheduler
"""A schedule of the learning rate: ours, or an adapter of torch's."""


class Trained(NamedTuple):
    """What a training changes, as checkpoints know it."""

    model: list[nn.Module]
    optimizer: UserOptimizer | None
    scheduler: UserScheduler | None


DataSource = EvalLoader | Iterator[Batch] | list[Iterator[Batch]]
"""What an evaluation reads: the last is a list of one iterator of micro-batches."""

NonLossFunction = Callable[..., object]
"""A user's function that collects or shows data of an evaluation beside its losses."""

Loggers = Mapping[str, Any]
"""Objects that take metrics, by the name of their tracker: each has the methods of its own client."""

Values = Mapping[str, Any]
"""Numbers and tensors of one element by name, perhaps still unread."""


def has_state(owner: object) -> TypeGuard[HasState]:
    """Whether an object has a state that can be saved and loaded; a class or a module of code has none of its own."""
    return is_stateful(owner)
