"""Collects the parameters of a model by name, from a module or several chunks, wrapped or sharded."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from torch import Tensor, nn

from onstep.events.context import plain_name, unwrap

logger: logging.Logger = logging.getLogger(__name__)

Model = nn.Module | Sequence[nn.Module]
"""A module, or a sequence of model chunks."""


def chunks_of(model: Model) -> list[nn.Module]:
    """The chunks of `model` without data-parallel and compile wrappers; a module is a single chunk."""
    return [unwrap(chunk) for chunk in ([model] if isinstance(model, nn.Module) else model)]


def named_parameters(model: Model) -> dict[str, Tensor]:
    """Every parameter once, in module order; a tied one under its first name.

    Chunks are merged: a name already used in an earlier chunk is prefixed with ``chunks.<number>.``.
    """
    found: dict[str, Tensor] = {}
    seen: set[Tensor] = set()
    for number, chunk in enumerate(chunks_of(model)):
        for name, parameter in chunk.named_parameters():
            if parameter in seen:
                continue
            seen.add(parameter)
            name = plain_name(name)
            found[f"chunks.{number}.{name}" if name in found else name] = parameter
    return found


def measurable_parameters(model: Model) -> dict[str, Tensor]:
    """The parameters of which a norm can be computed: all except `missing_parameters`."""
    return {name: one for name, one in named_parameters(model).items() if _why_not(one) is None}


def missing_parameters(model: Model) -> dict[str, str]:
    """The parameters without a norm, by name, with the reason: on the meta device, or integer (quantized)."""
    reasons = {name: _why_not(one) for name, one in named_parameters(model).items()}
    return {name: reason for name, reason in reasons.items() if reason is not None}


class MissingOnce:
    """Logs a single warning about parameters without a norm.

    Args:
        who: name of the caller, for the message.
    """

    def __init__(self, who: str) -> None:
        self._who = who
        self._has_warned = False

    def say(self, model: Model) -> None:
        """Warn if `model` has parameters without a norm, unless this object has warned before."""
        if self._has_warned:
            return
        missing = missing_parameters(model)
        if missing:
            self._has_warned = True
            shown = ", ".join(f"{name} ({reason})" for name, reason in [*missing.items()][:3])
            more = ", ..." if len(missing) > 3 else ""
            logger.warning("%s skips %d parameters without values: %s%s", self._who, len(missing), shown, more)


def reshard(model: Model) -> None:
    """Reshard FSDP2 modules, so that their parameters are the shards.

    After an evaluation, a root module keeps its gathered weights, in the lower precision used for computation.
    """
    if "torch.distributed.fsdp" not in sys.modules:
        return
    from torch.distributed.fsdp import FSDPModule

    for chunk in chunks_of(model):
        for module in chunk.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _why_not(parameter: Tensor) -> str | None:
    if parameter.is_meta:
        return "on the meta device"
    is_packed = str(parameter.dtype).startswith("torch.float4")  # two values per byte, which torch cannot unpack
    if is_packed or not (parameter.is_floating_point() or parameter.is_complex()):
        return f"of dtype {str(parameter.dtype).removeprefix('torch.')}"
    return None
