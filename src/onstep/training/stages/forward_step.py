"""Defines the default forward step, and binds the run's state to forward steps that accept it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from functools import partial
from types import UnionType
from typing import Annotated, Union, get_args, get_origin

from torch import Tensor, nn

from onstep.distributed.pipeline.seats import is_staged
from onstep.errors import ConfigError
from onstep.training.compute.losses import IGNORE_INDEX, Scalar, described
from onstep.training.compute.packed_inputs import packed_inputs
from onstep.training.protocols import ForwardStep
from onstep.training.run import Run


def forward_step(
    data_iterator: Iterator[dict[str, Tensor]], model: nn.Module, return_schedule_plan: bool = False
) -> tuple[Tensor, partial[tuple[Tensor, Scalar, dict[str, object]]]]:
    """Next-token prediction on micro-batches `{"tokens": (batch, seq), "labels": (batch, seq)}`.

    Labels are already shifted; labels equal to -100 are not trained on. `position_ids` and `document_ids` of packed
    sequences, also (batch, seq), are passed on by `packed_inputs`. Returns the sum of the losses and the function that
    counts them.

    Args:
        data_iterator: yields the micro-batches.
        model: the model.
        return_schedule_plan: as in Megatron; must be False.
    """
    batch = next(data_iterator)
    packed = packed_inputs(batch, data_iterator, model)
    loss_sum = model(batch["tokens"], batch["labels"], reduction="sum", **packed)
    return loss_sum, partial(next_token_loss, batch)


def check_chunks(model: Sequence[nn.Module]) -> None:
    """Refuse (ConfigError) what no engine runs: a model that is not a list, or other chunks than one."""
    if not isinstance(model, (list, tuple)):
        raise ConfigError(f"model must be a list with one module, got {type(model).__name__}; pass [model].")
    if is_staged(model):
        return
    if len(model) != 1:
        raise ConfigError(
            f"model has {len(model)} chunks, and only a model of 1 can be trained or evaluated: several are stages of "
            f"a pipeline, which pretrain() cuts by parallel.pipeline_model_parallel_size, so that all but the first "
            f"would be left out. Pass one module that contains them."
        )


def next_token_loss(batch: dict[str, Tensor], loss_sum: Tensor) -> tuple[Tensor, Scalar, dict[str, object]]:
    """`(sum of losses, number of labels, report)` of a micro-batch."""
    known = batch.get("num_tokens")
    return loss_sum, known if known is not None else batch["labels"].ne(IGNORE_INDEX).sum(), {}


def needs_global_state_injection(forward_step_func: ForwardStep) -> bool:
    """Whether a forward step expects the run's state as its first argument.

    True if a parameter is annotated with `GlobalState` (or `GlobalState | None`), or the first one is named `state` or
    `global_state`. Works for functions, partials, callable objects and bound methods.

    Args:
        forward_step_func: the forward step given to `train`; it is not called here.

    Raises:
        ValueError: for a builtin without a signature.
    """
    parameters = list(inspect.signature(forward_step_func).parameters.values())
    if any(_means_global_state(parameter.annotation) for parameter in parameters):
        return True
    return bool(parameters) and parameters[0].name in ("state", "global_state")


def maybe_inject_state(forward_step_func: ForwardStep, state: Run, needs_injection: bool | None = None) -> ForwardStep:
    """The forward step with `state` bound as its first argument if it expects one, else unchanged.

    Args:
        forward_step_func: a function or any callable object; attributes are preserved.
        state: bound by reference: later changes are visible.
        needs_injection: whether it expects the state, if known; None inspects its signature.
    """
    if needs_injection is None:
        needs_injection = needs_global_state_injection(forward_step_func)
    return partial(forward_step_func, state) if needs_injection else forward_step_func


def prepare_forward_step_func(forward_step_func: ForwardStep, state: Run) -> ForwardStep:
    """`maybe_inject_state`, decided once per `train()` or `evaluate()`.

    Args:
        forward_step_func: a function with one of the documented signatures.
        state: the run's state.

    Raises:
        ConfigError: for what cannot be called with `(data_iterator, model)`.
    """
    rule = "the forward step must be a function of (data_iterator, model)"
    if not callable(forward_step_func):
        raise ConfigError(
            f"{rule}, got {described(forward_step_func)}; pass other arguments, such as callbacks=[...], by their names"
        )
    prepared = maybe_inject_state(forward_step_func, state)
    signature = inspect.signature(prepared)
    try:
        signature.bind(None, None)
    except TypeError as error:
        name = getattr(forward_step_func, "__name__", type(forward_step_func).__name__)
        raise ConfigError(
            f"{rule}, but {name} has the arguments ({', '.join(signature.parameters)}): {error}"
        ) from error
    return prepared


def _means_global_state(annotation: object) -> bool:
    if isinstance(annotation, str):
        return "GlobalState" in annotation
    if get_origin(annotation) in (Union, UnionType, Annotated):
        return any(_means_global_state(one) for one in get_args(annotation))
    return getattr(annotation, "__name__", "") == "GlobalState"
