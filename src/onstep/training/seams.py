"""Types of what the training layer meets at its seams, named once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from onstep.optim.protocol import HasParamGroups, HasState, ParamScheduler

StateDict = dict[str, Any]
"""What a `state_dict()` gives: tensors, numbers, texts, and containers of these."""

Metrics = dict[str, Any]
"""A record of the log by name: numbers, and what callbacks add."""

ForwardStep = Callable[..., Any]
"""`forward_step(data_iterator, model)`, optionally with the state first and `return_schedule_plan` last; gives
`(output, loss_function)`."""

Wrapped = Callable[..., Any]
"""A piece of the loop's work, before or after a feature has wrapped it."""


class UserOptimizer(HasParamGroups, HasState, Protocol):
    """An optimizer as callbacks and checkpoints know it: ours, torch's, or one of Megatron-Core's convention."""


UserScheduler = ParamScheduler
"""A schedule of the learning rate: ours, or an adapter of torch's."""


DataSource = Any
"""An `EvalLoader`, an iterator of micro-batches, or a list of one."""

NonLossFunction = Callable[..., Any]
"""A user's function that collects or shows data of an evaluation beside its losses."""

Loggers = Mapping[str, Any]
"""Objects that take metrics, by the name of their tracker: each has the methods of its own client."""

Values = Mapping[str, Any]
"""Numbers and tensors of one element by name, perhaps still unread."""
