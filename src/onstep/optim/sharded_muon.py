"""Muon beyond torch's: in float32, and for matrices in shards, of which each rank orthogonalizes some whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import _muon as torchs

from onstep.distributed.shards import as_dtensor, split_of
from onstep.distributed.tensor_regions import joined
from onstep.errors import ShardingError

PRECISION = "fp32_matmul_prec"
"""The setting of a group whose updates are orthogonalized in float32; groups of torch's Muon do not have it."""


class Float32Muon(torch.optim.Muon):
    """Torch's Muon, except that updates are orthogonalized in float32, or float64 where the weights are.

    Args:
        params: as of torch's, and so are the keywords.
    """

    def __init__(self, params: Any, **keywords: Any) -> None:
        super().__init__(params, **keywords)
        for group in self.param_groups:
            group[PRECISION] = "highest"

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the matrices.

        Args:
            closure: must be None; a step here never computes the loss again.
        """
        assert closure is None, "a training step has no closure"
        step(self)


class Held(NamedTuple):
    """What this rank has of a matrix and its gradient."""

    parameter: Tensor
    """Whose layout says how the ranks divide it."""
    part: Tensor
    """That of this rank, which is updated in place: (rows, columns)."""
    grad: Tensor
    momentum: Tensor
    """Updated in place."""
    group: dict[str, Any]
    """The parameter group."""


class _Outer(NamedTuple):
    """How a matrix is divided along the first of two dimensions of its mesh."""

    dim: int
    """0 for rows, 1 for columns."""
    length: int
    """The number of these that the ranks along that dimension have together."""
    among: ProcessGroup

    def joined(self, part: Tensor) -> Tensor:
        """The parts of these ranks together. Collective."""
        return joined(part, self.dim, self.among, self.length)

    def own(self, whole: Tensor) -> Tensor:
        """This rank's part."""
        sizes = _sizes(self.length, self.among.size())
        return torch.split(whole, sizes, self.dim)[self.among.rank()]


class _Matrix(NamedTuple):
    """A matrix of which the ranks of a group have some rows, or some columns, each."""

    held: Held
    outer: _Outer | None
    """How it is divided along another dimension of the mesh, too."""
    update: Tensor
    """What this rank has of the update before it is orthogonalized; whole along the other dimension."""
    dim: int
    """0 for rows, 1 for columns."""
    sizes: list[int]
    """The number of these that each rank has."""
    owner: int
    """The rank that orthogonalizes it."""

    def shape(self, rank: int) -> list[int]:
        """The shape of what a rank has."""
        shape = list(self.update.shape)
        shape[self.dim] = self.sizes[rank]
        return shape

    def numel(self, rank: int) -> int:
        """The number of elements that a rank has."""
        return math.prod(self.shape(rank))


@torch.no_grad()
def step(optimizer: torch.optim.Muon) -> None:
    """One step of an optimizer whose parameters are DTensors, or plain tensors among them.

    Momentum and weight decay are of this rank's part. Collective for the ranks of each mesh: two exchanges, of the
    parts of the gradients with momentum and of the results, which are in the type of the iteration. Those of a matrix
    that is divided along two dimensions of its mesh are gathered along the first one before, each by itself.

    Args:
        optimizer: torch's, whose state this is too.

    Raises:
        ShardingError: for a matrix that is divided along more than two dimensions of its mesh.
    """
    held: list[Held] = []
    for group in optimizer.param_groups:
        params: list[Tensor] = []
        grads: list[Tensor] = []
        buffers: list[Tensor] = []
        optimizer._init_group(group, params, grads, buffers)
        held += [
            Held(parameter, _local(parameter), _local(grad), _local(buffer), group)
            for parameter, grad, buffer in zip(params, grads, buffers, strict=True)
        ]
    update(held)


@torch.no_grad()
def update(held: Sequence[Held]) -> None:
    """Update matrices of which this rank has a part. Collective, as `step`.

    Args:
        held: the matrices, in the same order on all ranks.

    Raises:
        ShardingError: for a matrix that is divided along more than two dimensions of its mesh.
    """
    parts: dict[ProcessGroup, list[_Matrix]] = {}
    loads: dict[ProcessGroup, list[int]] = {}
    for one in held:
        moved = _with_momentum(one.grad, one.momentum, one.group)
        divided = _divided_along(one.parameter)
        if not divided:
            _apply(one.part, _orthogonal(moved, one.group), one.parameter.shape, one.group)
            continue
        known: Any = one.parameter
        among, dim = known.device_mesh.get_group(divided[-1]), known.placements[divided[-1]].dim
        outer = _outer(known, divided)
        moved = moved if outer is None else outer.joined(moved)
        load = loads.setdefault(among, [0] * among.size())
        owner = load.index(min(load))
        load[owner] += known.numel()
        sizes = _sizes(known.shape[dim], among.size())
        parts.setdefault(among, []).append(_Matrix(one, outer, moved, dim, sizes, owner))
    for among, matrices in parts.items():
        for result, matrix in zip(_whole_by_rank(matrices, among), matrices, strict=True):
            own = result if matrix.outer is None else matrix.outer.own(result)
            _apply(matrix.held.part, own, matrix.held.parameter.shape, matrix.held.group)


def update_whole(params: list[Tensor], grads: list[Tensor], buffers: list[Tensor], group: dict[str, Any]) -> None:
    """One step of matrices that this rank has whole.

    Args:
        params: the matrices.
        grads: their gradients.
        buffers: their momentum.
        group: the settings.
    """
    for parameter, grad, buffer in zip(params, grads, buffers, strict=True):
        _apply(parameter, _orthogonal(_with_momentum(grad, buffer, group), group), parameter.shape, group)


def _with_momentum(grad: Tensor, buffer: Tensor, group: dict[str, Any]) -> Tensor:
    buffer.lerp_(grad, 1 - group["momentum"])
    return grad.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer


def _whole_by_rank(matrices: list[_Matrix], among: ProcessGroup) -> list[Tensor]:
    """This rank's part of each orthogonalized matrix."""
    ranks, rank = among.size(), dist.get_rank(among)
    by_owner = [[one for one in matrices if one.owner == owner] for owner in range(ranks)]
    sizes = [[sum(one.numel(holder) for one in own) for own in by_owner] for holder in range(ranks)]
    sent = _flat([one.update for own in by_owner for one in own], matrices[0].update)
    got = sent.new_empty(sum(sizes[holder][rank] for holder in range(ranks)))
    dist.all_to_all_single(got, sent, [sizes[holder][rank] for holder in range(ranks)], sizes[rank], group=among)
    by_holder = list(torch.split(got, [sizes[holder][rank] for holder in range(ranks)]))
    pieces = [
        [
            piece.view(one.shape(holder))
            for piece, one in zip(torch.split(flat, _numels(by_owner[rank], holder)), by_owner[rank], strict=True)
        ]
        for holder, flat in enumerate(by_holder)
    ]
    whole = [
        _orthogonal(torch.cat([of_holder[number] for of_holder in pieces], one.dim), one.held.group)
        for number, one in enumerate(by_owner[rank])
    ]
    back = [torch.split(matrix, one.sizes, one.dim) for matrix, one in zip(whole, by_owner[rank], strict=True)]
    returned = _flat([parts[holder] for holder in range(ranks) for parts in back], sent, _iterates_in(matrices[0]))
    results = returned.new_empty(sum(sizes[rank]))
    dist.all_to_all_single(
        results, returned, sizes[rank], [sizes[holder][rank] for holder in range(ranks)], group=among
    )
    found: dict[int, Tensor] = {}
    for own, flat in zip(by_owner, torch.split(results, sizes[rank]), strict=True):
        for one, piece in zip(own, torch.split(flat, _numels(own, rank)), strict=True):
            found[id(one.update)] = piece.view(one.shape(rank))
    return [found[id(one.update)] for one in matrices]


def _numels(matrices: list[_Matrix], holder: int) -> list[int]:
    return [one.numel(holder) for one in matrices]


def _flat(tensors: list[Tensor], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    parts = [one.reshape(-1) for one in tensors]
    return torch.cat(parts) if parts else like.new_empty(0, dtype=dtype or like.dtype)


def _iterates_in(matrix: _Matrix) -> torch.dtype:
    is_precise = PRECISION in matrix.held.group
    return torch.promote_types(matrix.update.dtype, torch.float32) if is_precise else torch.bfloat16


def _orthogonal(update: Tensor, group: dict[str, Any]) -> Tensor:
    settings = group["ns_coefficients"], group["ns_steps"], group["eps"]
    return (_in_float32 if PRECISION in group else torchs._zeropower_via_newtonschulz)(update, *settings)


def _in_float32(update: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """The iteration of torch's `_zeropower_via_newtonschulz`, not rounded to bfloat16."""
    a, b, c = coefficients
    is_tall = update.shape[0] > update.shape[1]
    x = update.to(torch.promote_types(update.dtype, torch.float32))
    x = x.T if is_tall else x
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def _apply(shard: Tensor, update: Tensor, shape: torch.Size, group: dict[str, Any]) -> None:
    rate = float(group["lr"])
    shard.mul_(1 - rate * group["weight_decay"])
    shard.add_(update, alpha=-torchs._adjust_lr(rate, group["adjust_lr_fn"], shape))


def _local(tensor: Tensor) -> Tensor:
    dtensor = as_dtensor(tensor)
    return tensor if dtensor is None else dtensor.to_local()


def _sizes(length: int, ranks: int) -> list[int]:
    """The rows or columns of each rank, as torch divides them."""
    most = -(-length // ranks)
    return [max(0, min(most, length - most * rank)) for rank in range(ranks)]


def _divided_along(parameter: Tensor) -> list[int]:
    """The dimensions of its mesh along which a matrix is divided; none for one that each rank has whole."""
    dtensor = as_dtensor(parameter)
    divided = list(split_of(parameter).dims)
    if dtensor is not None and len(divided) > 2:
        raise ShardingError(
            f"Muon requires matrices that are divided along two dimensions of a mesh at most, got "
            f"{dtensor.placements} on {dtensor.device_mesh}; use AdamW for them."
        )
    return divided


def _outer(parameter: Any, divided: list[int]) -> _Outer | None:
    if len(divided) < 2:
        return None
    (mesh, placements), (first, last) = (parameter.device_mesh, parameter.placements), divided
    dim, inner = placements[first].dim, mesh.get_group(last)
    length = parameter.shape[dim]
    if placements[last].dim == dim:  # torch divides what the ranks along the last dimension have
        length = _sizes(length, inner.size())[inner.rank()]
    return _Outer(dim, length, mesh.get_group(first))
