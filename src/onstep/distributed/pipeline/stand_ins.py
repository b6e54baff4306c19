"""Shows the user's code on a stage of a pipeline the modules of other stages, without the values of their weights.

A sum over `model.parameters()` or `model.modules()` would otherwise leave them out without a word.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from onstep.distributed.pipeline.seats import Seat
from onstep.errors import OtherStageError


class StandIn(nn.Parameter):
    """A weight of another stage: its shape and type are known, and computing with it is an error."""

    lacks: Callable[[], OtherStageError]
    """Makes that error."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """What a function of torch returns that computes nothing; one in place changes nothing.

        Raises:
            OtherStageError: for others.
        """
        given = tree_leaves((args, kwargs))
        lacks = next(one for one in given if isinstance(one, StandIn)).__dict__["lacks"]
        try:
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **(kwargs or {}))
        except RuntimeError as error:
            raise lacks() from error
        if any(isinstance(one, Tensor) and all(one is not known for known in given) for one in tree_leaves(result)):
            raise lacks()
        return result


@dataclass(frozen=True)
class StandIns:
    """Modules like those of other stages, which a stage has without having their weights."""

    modules: dict[str, nn.Module]
    """By their names in the whole model."""

    def __reduce__(self) -> tuple[type[StandIns], tuple[dict[str, nn.Module]]]:
        """A copy of a stage is of that alone."""
        return StandIns, ({},)


def stand_ins_of(whole: nn.Module, stage: Any) -> StandIns:
    """Modules like those of other stages, whose weights are stand-ins.

    Args:
        whole: the model.
        stage: which has those modules and their stages as `elsewhere`; of a tied weight that it has, it shows that.
    """
    own = {name.rpartition(".")[0] for name, _ in stage.named_parameters()}
    return StandIns(
        {
            name: _like(whole.get_submodule(name), stage.pipeline_seat, at, f"{name}.")
            for name, at in stage.elsewhere.items()
            if name not in own
        }
    )


def _like(module: nn.Module, seat: Seat, stage: int, prefix: str) -> nn.Module:
    made: nn.Module = module.__class__.__new__(module.__class__)
    made.__dict__ = {
        **{name: one.copy() if isinstance(one, dict) else one for name, one in vars(module).items()},  # hooks too
        "_parameters": {
            name: one if one is None else _outline(one, partial(seat.lacks, prefix + name, stage))
            for name, one in module._parameters.items()
        },
        "_buffers": {name: one if one is None else one.to("meta") for name, one in module._buffers.items()},
        "_modules": {
            name: one if one is None else _like(one, seat, stage, f"{prefix}{name}.")
            for name, one in module._modules.items()
        },
    }
    return made


def _outline(parameter: Tensor, lacks: Callable[[], OtherStageError]) -> StandIn:
    values = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    made = StandIn(values, parameter.requires_grad)
    made.lacks = lacks
    return made


@dataclass
class Shown:
    """Context in which the modules of a stage, and so its weights, include the stand-ins of others.

    The stage's own code, whenever a call of it is under way, gets those of the stage alone.
    """

    chunk: nn.Module
    """A stage, or a whole model, of which nothing is elsewhere."""

    def __enter__(self) -> None:
        self.chunk.__dict__["named_modules"] = self._named_modules

    def __exit__(self, *error: object) -> None:
        del self.chunk.__dict__["named_modules"]

    def _named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        yield from type(self.chunk).named_modules(self.chunk, memo, prefix, remove_duplicate)
        stand_ins: StandIns | None = self.chunk.__dict__.get("stand_ins")
        if stand_ins is not None and not _is_running(self.chunk):
            for name, module in stand_ins.modules.items():
                yield from module.named_modules(memo, f"{prefix}.{name}" if prefix else name, remove_duplicate)


def _is_running(module: nn.Module) -> bool:
    """Whether a call of the module is under way."""
    frame = sys._getframe(1)
    while frame is not None and not (
        frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals.get("self") is module
    ):
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None
