"""Muon beyond torch's: in float32, and for matrices in shards, of which each rank orthogonalizes some whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import _muon as torchs

from onstep.distributed.shards import as_dtensor
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
    """Whose layout says how the ranks divide the rows."""
    rows: Tensor
    """Those of this rank, which are updated in place: (rows, columns)."""
    grad: Tensor
    momentum: Tensor
    """Updated in place."""
    group: dict[str, Any]
    """The parameter group."""


class _Matrix(NamedTuple):
    """A matrix of which this rank has some rows."""

    parameter: Tensor
    """These rows, and so on."""
    update: Tensor
    rows: list[int]
    """The rows of each rank."""
    owner: int
    """The rank that orthogonalizes it."""
    group: dict[str, Any]
    """The parameter group."""

    @property
    def columns(self) -> int:
        return self.update.shape[1]


@torch.no_grad()
def step(optimizer: torch.optim.Muon) -> None:
    """One step of an optimizer whose parameters are DTensors, or plain tensors among them.

    Momentum and weight decay are of this rank's rows. Collective for the ranks of each mesh: two exchanges, of the rows
    of the gradients with momentum and of the results, which are in the type of the iteration.

    Args:
        optimizer: torch's, whose state this is too.

    Raises:
        ShardingError: for a matrix that is not divided by its rows along one dimension of its mesh.
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
    """Update matrices of which this rank has some rows. Collective, as `step`.

    Args:
        held: the matrices, in the same order on all ranks.

    Raises:
        ShardingError: for a matrix that is not divided by its rows along one dimension of its mesh.
    """
    parts: dict[ProcessGroup, list[_Matrix]] = {}
    loads: dict[ProcessGroup, list[int]] = {}
    for parameter, rows_here, grad, buffer, group in held:
        among = _group_of(parameter)
        moved = _with_momentum(grad, buffer, group)
        if among is None:
            _apply(rows_here, _orthogonal(moved, group), parameter.shape, group)
            continue
        load = loads.setdefault(among, [0] * among.size())
        owner = load.index(min(load))
        load[owner] += parameter.numel()
        rows = _rows(parameter.shape[0], among.size())
        parts.setdefault(among, []).append(_Matrix(rows_here, moved, rows, owner, group))
    for among, matrices in parts.items():
        for results, one in zip(_whole_by_rank(matrices, among), matrices, strict=True):
            _apply(one.parameter, results, torch.Size((sum(one.rows), one.columns)), one.group)


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
    """This rank's rows of each orthogonalized matrix."""
    ranks, rank = among.size(), dist.get_rank(among)
    by_owner = [[one for one in matrices if one.owner == owner] for owner in range(ranks)]
    sizes = [[sum(one.rows[holder] * one.columns for one in own) for own in by_owner] for holder in range(ranks)]
    sent = _flat([one.update for own in by_owner for one in own], matrices[0].update)
    got = sent.new_empty(sum(sizes[holder][rank] for holder in range(ranks)))
    dist.all_to_all_single(got, sent, [sizes[holder][rank] for holder in range(ranks)], sizes[rank], group=among)
    by_holder = list(torch.split(got, [sizes[holder][rank] for holder in range(ranks)]))
    pieces = [
        [
            piece.view(-1, one.columns)
            for piece, one in zip(torch.split(flat, _numels(by_owner[rank], holder)), by_owner[rank], strict=True)
        ]
        for holder, flat in enumerate(by_holder)
    ]
    whole = [
        _orthogonal(torch.cat([of_holder[number] for of_holder in pieces]), one.group)
        for number, one in enumerate(by_owner[rank])
    ]
    back = [torch.split(matrix, one.rows) for matrix, one in zip(whole, by_owner[rank], strict=True)]
    returned = _flat([parts[holder] for holder in range(ranks) for parts in back], sent, _iterates_in(matrices[0]))
    results = returned.new_empty(sum(sizes[rank]))
    dist.all_to_all_single(
        results, returned, sizes[rank], [sizes[holder][rank] for holder in range(ranks)], group=among
    )
    found: dict[int, Tensor] = {}
    for own, flat in zip(by_owner, torch.split(results, sizes[rank]), strict=True):
        for one, piece in zip(own, torch.split(flat, _numels(own, rank)), strict=True):
            found[id(one.parameter)] = piece.view(-1, one.columns)
    return [found[id(one.parameter)] for one in matrices]


def _numels(matrices: list[_Matrix], holder: int) -> list[int]:
    return [one.rows[holder] * one.columns for one in matrices]


def _flat(tensors: list[Tensor], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    parts = [one.reshape(-1) for one in tensors]
    return torch.cat(parts) if parts else like.new_empty(0, dtype=dtype or like.dtype)


def _iterates_in(matrix: _Matrix) -> torch.dtype:
    is_precise = PRECISION in matrix.group
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


def _rows(rows: int, ranks: int) -> list[int]:
    """The rows of each rank, as torch divides them."""
    most = -(-rows // ranks)
    return [max(0, min(most, rows - most * rank)) for rank in range(ranks)]


def _group_of(parameter: Tensor) -> ProcessGroup | None:
    """The ranks between which a matrix is divided by its rows; None for one that each has whole."""
    dtensor = as_dtensor(parameter)
    if dtensor is None:
        return None
    divided = [dim for dim, one in enumerate(dtensor.placements) if not one.is_replicate()]
    if not divided:
        return None
    if len(divided) > 1 or not dtensor.placements[divided[0]].is_shard(0):
        raise ShardingError(
            f"Muon requires matrices that are divided by their rows along one dimension of a mesh, got "
            f"{dtensor.placements} on {dtensor.device_mesh}; use AdamW for them."
        )
    return dtensor.device_mesh.get_group(divided[0])
