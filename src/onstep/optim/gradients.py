"""Finds the gradients of sharded parameters on this rank, and computes their norm over all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onstep.distributed.block_norms import norms_of
from onstep.distributed.shard_sums import Kinds, sum_together
from onstep.distributed.shards import as_dtensor, is_sharded, with_local_value
from onstep.errors import ShardingError
from onstep.optim.gradient_scaling import multiply


class ShardedGradients:
    """The gradients of parameters of which some are DTensors, as plain tensors: the parts that this rank holds.

    What depends on the parameters alone is found out once. Plain and sharded parameters may be mixed, and meshes may
    differ.

    Args:
        params: the parameters, in the same order on all ranks of a mesh.
        names: names of the parameters, for errors.

    Raises:
        ShardingError: if a parameter is `Partial`: its ranks hold summands, whose squares do not add up.
    """

    def __init__(self, params: Sequence[Tensor], names: Sequence[str] = ()) -> None:
        for place, param in enumerate(params):
            dtensor = as_dtensor(param)
            if dtensor is not None and any(one.is_partial() for one in dtensor.placements):
                name = names[place] if names else f"parameter {place} of the optimizer, {tuple(param.shape)},"
                raise ShardingError(
                    f"{name} must be sharded or replicated, got {dtensor.placements}: its ranks hold summands, each of "
                    f"which would be updated by itself; call its redistribute() before the optimizer is made"
                )
        self.kinds = Kinds(params)
        kinds = self.kinds.members if self.kinds.sums.has_others else [list(params)]
        self._members = [[(param, as_dtensor(param) is not None) for param in kind] for kind in kinds]
        self._sizes: list[int] = []
        self._has_shared = any(getattr(param, "shared", False) for param in params)
        self._counts: list[float] = []
        """For each part whether it is counted, if there is one that the rank counts which shares it."""
        dtypes = {param.dtype for param in params}
        self._dtype = torch.float64 if torch.float64 in dtypes else torch.float32

    def collect(self) -> list[Tensor]:
        """The parts of all gradients that exist, by kind. Call it without autograd.

        A gradient whose ranks hold summands, as torch's sequence parallelism leaves those of norms, or that is sharded
        differently from its parameter, is replaced by one like its parameter. Collective for such gradients.
        """
        parts: list[Tensor] = []
        self._sizes, self._counts = [], []
        sum_replicas([param for members in self._members for param, is_dtensor in members if is_dtensor])
        for members in self._members:
            start = len(parts)
            for param, is_dtensor in members:
                grad = param.grad
                if grad is None:
                    continue
                if is_dtensor:
                    shards: Any = grad
                    if shards.placements != param.placements:  # type: ignore[attr-defined]
                        shards = param.grad = shards.redistribute(placements=param.placements)  # type: ignore[attr-defined]
                    grad = shards.to_local()
                parts.append(grad)
                if self._has_shared:
                    self._counts.append(float(not getattr(param, "shared", False)))
            self._sizes.append(len(parts) - start)
        return parts

    def norm(self, parts: list[Tensor], device: torch.device) -> Tensor:
        """The L2 norm of all whole gradients, 0-d, the same on all ranks to the bit. Collective.

        It is in float64 if a parameter is, else in float32.

        Args:
            parts: what `collect` returned.
            device: the device of the result.
        """
        norms = self._norms(parts, device)
        if parts and not self.kinds.sums.has_others:
            norm: Tensor = torch.linalg.vector_norm(norms)
            return norm
        return self._square(norms).sqrt()

    def square(self, parts: list[Tensor], device: torch.device) -> Tensor:
        """The sum of the squares of all whole gradients but those marked as `shared`, 0-d float64. Collective.

        Args:
            parts: what `collect` returned.
            device: the device of the result.
        """
        norms = self._norms(parts, device).double()
        return self._square(norms * norms.new_tensor(self._counts) if self._counts else norms)

    def _norms(self, parts: list[Tensor], device: torch.device) -> Tensor:
        if not parts:
            return torch.zeros(0, dtype=self._dtype, device=device)
        return torch.stack([norm.to(device) for norm in norms_of(parts, self._dtype)])

    def _square(self, norms: Tensor) -> Tensor:
        """That of the norms of all parts, over all ranks that hold any."""
        of_kinds = torch.stack([of_kind.sum() for of_kind in torch.split(norms.square(), self._sizes)])
        total: Tensor = self.kinds.sums(of_kinds).sum()
        return total


def sum_replicas(params: Sequence[Tensor]) -> None:
    """Sum the gradients of replicated parameters whose ranks hold summands: one collective for each group and type.

    Args:
        params: parameters, of which those without a gradient are left out.
    """
    of_group: dict[tuple[Any, int, torch.dtype], list[Tensor]] = {}
    for param in params:
        grad: Any = param.grad
        if grad is None or not grad.placements[-1].is_partial("sum"):
            continue
        *others, last = param.placements  # type: ignore[attr-defined]
        if last.is_replicate() and tuple(others) == grad.placements[:-1]:
            of_group.setdefault((grad.device_mesh, len(others), grad.dtype), []).append(param)
    for (mesh, dim, _), members in of_group.items():
        own = [param.grad.to_local() for param in members]  # type: ignore[union-attr]
        sum_together(own, partial(dist.all_reduce, group=mesh.get_group(dim)))
        for param, total in zip(members, own, strict=True):
            param.grad = with_local_value(param, total)


def clip_grad_norm(params: Tensor | Iterable[Tensor] | Iterable[tuple[str, Tensor]], max_norm: float) -> Tensor:
    """Clip the L2 norm of all gradients over all ranks, as torch's `clip_grad_norm_` does for tensors of one kind.

    Plain and sharded parameters may be mixed, and meshes may differ. Collective if parameters are DTensors.

    Args:
        params: the parameters, or pairs of a name, for errors, and a parameter; those without a gradient are left out.
        max_norm: the greatest norm; infinity only computes it.

    Returns:
        The norm before clipping, 0-d, the same on all ranks to the bit; the host does not wait for it.
    """
    given = [params] if isinstance(params, Tensor) else list(params)
    pairs = [one if isinstance(one, tuple) else (_unnamed(place, one), one) for place, one in enumerate(given)]
    params = [param for _, param in pairs]
    if not is_sharded(params):
        return torch.nn.utils.clip_grad_norm_(params, max_norm)
    with torch.no_grad():
        gradients = ShardedGradients(params, [name for name, _ in pairs])
        parts = gradients.collect()
        norm = gradients.norm(parts, params[0].device)
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        multiply(parts, factor, spans_devices=any(part.device != factor.device for part in parts))
    return norm


def _unnamed(place: int, param: Tensor) -> str:
    return f"parameter {place} of those to clip, {tuple(param.shape)},"
