"""Runs a model in the middle of training without any effect on the training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from onstep.checkpoint import RngState
from onstep.distributed.main_only import main_only
from onstep.distributed.pipeline.seats import seat_of
from onstep.distributed.pipeline.whole import pipeline_of
from onstep.distributed.shards import is_sharded, usable_shards
from onstep.errors import RankFailedError, named_text
from onstep.events.context import unwrap
from onstep.models.generation.generate import preserve_modes

T = TypeVar("T")


def is_run_by_all(model: Any) -> bool:
    """Whether all ranks must call the model together, because each has only a part of it: shards, or stages."""
    return hasattr(model, "parameters") and (seat_of(unwrap(model)) is not None or is_sharded(model.parameters()))


def generate_undisturbed(model: Any, generate: Callable[[], T]) -> T:
    """What `generate` makes of the model, without any effect on the training. Collective if the model is sharded.

    Args:
        model: the model that it calls.
        generate: without arguments; called on this rank.

    Raises:
        RankFailedError: on all ranks, if `generate` has failed on some of those of a sharded model. If it has failed on
            all of them, they raise its error.
    """
    if not is_run_by_all(model):
        with preserve_state(model), main_only("the generation of text", "let the model's forward exchange nothing"):
            return generate()
    result, error = None, None
    try:
        with preserve_state(model):
            result = generate()
    except Exception as failure:  # noqa: BLE001 - what all ranks have met is raised below
        error = failure
    errors: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, None if error is None else named_text(error))
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(errors) if text is not None]
    if failed and len(failed) < len(errors):
        raise RankFailedError(f"the generation of text failed on some ranks only: {'; '.join(failed)}") from error
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


def _parts_of(model: Any) -> list[nn.Module]:
    """A model, or all stages of a pipeline that this rank has of it; nothing for what has no modules."""
    if not hasattr(model, "modules"):
        return []
    pipeline = pipeline_of(unwrap(model))
    return [model] if pipeline is None else pipeline.chunks


@contextmanager
def preserve_state(model: Any) -> Iterator[None]:
    """Switch to evaluation mode without compiled forwards, and restore these and the random generators on exit.

    Collective if the model is sharded.
    """
    parts = _parts_of(model)
    modules = [module for part in parts for module in part.modules()]
    # `module.compile()` stores its compiled call here; every new text length would recompile
    compiled = [(one, one._compiled_call_impl) for one in modules if getattr(one, "_compiled_call_impl", None)]
    parameter = next((one for part in parts for one in part.parameters()), None)
    generators = RngState("cpu" if parameter is None else parameter.device)
    try:
        with generators.kept(), preserve_modes(parts):
            for module in modules:  # not `eval()`, which a module may override to change more than its mode
                module.training = False
            for module, _ in compiled:
                module._compiled_call_impl = None
            with usable_shards(parts):
                yield
    finally:
        for module, call in compiled:
            module._compiled_call_impl = call
