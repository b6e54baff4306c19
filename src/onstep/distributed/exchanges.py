"""Tells how a layout exchanges gradients: by what their sum is divided, and after which backward passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from onstep.distributed.buffered import buffered_chunks
from onstep.distributed.pipeline.seats import is_staged
from onstep.distributed.shards import as_dtensor, parameter_groups, sharded_modules
from onstep.distributed.world import World
from onstep.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def divisor_of(chunks: Sequence[nn.Module], world: World) -> float:
    """The number by which the exchange divides the sum of the gradients of all ranks with different samples.

    One for what `fully_sharded` has divided, for stages of a pipeline, and where ranks divide the updates.
    DistributedDataParallel averages, and so does a model that the user has divided by `fully_shard`, unless its
    `set_gradient_divide_factor` says otherwise. Where nothing exchanges, as with a user's own hooks, an average is
    assumed.

    Args:
        chunks: the model chunks; one unless the model is split into several.
        world: the ranks of the run.

    Raises:
        ConfigError: if the parts of a model divide by different numbers.
    """
    size = world.data.size
    divisors: dict[float, str] = {}
    for chunk in chunks:
        names = {id(module): name for name, module in chunk.named_modules()}
        if buffered_chunks([chunk]) or is_staged([chunk]):
            divisors.setdefault(1.0, "the model")
        for module in sharded_modules(chunk):
            for group in parameter_groups(module):
                factor = group.gradient_divide_factor
                divisors.setdefault(float(size if factor is None else factor), names[id(module)] or "the model")
    if len(divisors) > 1:
        parts = " and ".join(f"{name} by {divisor:g}" for divisor, name in divisors.items())
        raise ConfigError(
            f"the gradients of a model must be divided by one number, but fully_shard divides those of {parts}; call "
            f"set_gradient_divide_factor with the same number on every module that fully_shard was given."
        )
    return next(iter(divisors), float(size))


def casts_weights(chunks: Sequence[nn.Module]) -> bool:
    """Whether the modules of a model cast what they gather, so that nothing is to be computed under autocast.

    Args:
        chunks: the model chunks; one unless the model is split into several.
    """
    return any(
        group.mp_policy.param_dtype is not None
        for chunk in chunks
        for module in sharded_modules(chunk)
        for group in parameter_groups(module)
    )


def keeping_local(modules: Sequence[FSDPModule]) -> AbstractContextManager[object]:
    """Backward passes in this context keep the gradients of the whole model; the next one outside sums them.

    Args:
        modules: those of `sharded_modules`.
    """
    return _keeping_local(modules) if modules else nullcontext()


@contextmanager
def _keeping_local(modules: Sequence[FSDPModule]) -> Iterator[None]:
    for module in modules:
        module.set_requires_gradient_sync(False, recurse=False)
    try:
        yield
    finally:
        for module in modules:
            module.set_requires_gradient_sync(True, recurse=False)


@contextmanager
def own_gradients(modules: Sequence[FSDPModule]) -> Iterator[list[Tensor]]:
    """The squared norms of the gradients that this rank computes in this context, before any are summed over ranks.

    What is exchanged are zeros, so that a NaN stays on the rank that has computed it. The weights must be gathered in
    this context, by forward passes.

    Args:
        modules: those of `sharded_modules`.
    """
    squares: list[Tensor] = []
    watched: set[int] = set()
    with ExitStack() as stack:

        def note(gradient: Tensor) -> Tensor:
            squares.append(gradient.double().square().sum())
            return torch.zeros_like(gradient)

        def watch(module: nn.Module, _: object) -> None:
            for parameter in module.parameters():
                is_new = parameter.requires_grad and id(parameter) not in watched
                if is_new and as_dtensor(parameter) is None:
                    watched.add(id(parameter))
                    handle = parameter.register_hook(note)  # type: ignore[no-untyped-call]
                    stack.callback(handle.remove)

        for module in modules:
            stack.callback(cast("nn.Module", module).register_forward_pre_hook(watch).remove)  # after it has gathered
        yield squares
