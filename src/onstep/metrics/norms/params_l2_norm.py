"""Computes the L2 norm of all parameters of a model across ranks, counting each logical parameter once.

Squares are summed in float64, whose range suffices for all smaller dtypes; for float64 parameters, values above 1e150
or below 1e-150 exceed it (`onstep.metrics.norms.parameter_norms` handles those).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onstep.distributed.shard_sums import ShardSums, device_of, has_others
from onstep.distributed.shards import Split, as_dtensor, local_part, split_of
from onstep.errors import ConfigError, ShardingError
from onstep.metrics.norms.named_parameters import chunks_of, measurable_parameters, reshard
from onstep.metrics.norms.parameter_norms import local_norms

_GROUPS = ("tp", "expt_tp", "dp_cp", "expt_dp", "mp", "tp_ep_pp")


class _Kind(NamedTuple):
    """Common properties of parameters that are summed and reduced together; identical on all ranks that share them."""

    split: Split
    is_expert: bool
    is_part: bool
    """Whether it is the shard held by this rank's optimizer (`main_param_sharded`)."""
    is_tensor_parallel: bool
    is_shared: bool


def calc_params_l2_norm(
    model: nn.Module | Sequence[nn.Module],
    model_config: Any,
    use_megatron_fsdp: bool = False,
    force_create_fp32_copy: bool = False,
    *,
    pg_collection: object = None,
) -> float:
    """The L2 norm of all parameters of a model over all ranks that hold it. Collective; synchronizes once.

    Each logical parameter counts once. DTensors (FSDP2, tensor parallelism) are summed over their mesh. If the first
    chunk has process groups as `pg_collection` (Megatron's: tp, expt_tp, dp_cp, expt_dp, mp, tp_ep_pp; a missing or
    None group has no other ranks), Megatron's attributes distinguish the parameters: those marked
    `tensor_model_parallel` are shards and count on every tensor-parallel rank, others on the first; `shared` ones do
    not count; experts (`allreduce` is False) are summed over the expert groups. Without groups and attributes, the
    result is the norm of the local parameters.

    Args:
        model: the model or its chunks; tied parameters count once.
        model_config: with a true `bf16`, the float32 `main_param` of a parameter is used instead if there is one; with
            `main_param_sharded` it is this rank's shard, which is summed over the data-parallel ranks.
        use_megatron_fsdp: all parameters must be DTensors, and a chunk's `stop_communication()` is called first.
        force_create_fp32_copy: use the parameters themselves even if there is a `main_param`. This needs no copy: sums
            are in float64 for any dtype.
        pg_collection: the process groups of a model that has none of its own, such as `GlobalState.pg_collection`.

    Raises:
        ConfigError: if an expert is marked as shared.
        ShardingError: if a parameter is not a DTensor with `use_megatron_fsdp`.
    """
    if use_megatron_fsdp:
        return calc_dtensor_params_l2_norm(_fully_sharded(model))
    return float(unread_params_l2_norm(model, model_config, force_create_fp32_copy, pg_collection=pg_collection))


def calc_dtensor_params_l2_norm(params: Iterable[Tensor]) -> float:
    """The L2 norm of the full DTensors, on every rank. One collective per mesh dimension.

    Args:
        params: the DTensors, in the same order on all ranks of their mesh.

    Raises:
        ShardingError: if a tensor is not a DTensor, or is `Partial`: the squares of partial sums do not add up.
    """
    kinds: dict[Split, dict[str, Tensor]] = {}
    for number, param in enumerate(params):
        dtensor = as_dtensor(param)
        if dtensor is None:
            raise ShardingError(f"parameter {number} must be a DTensor, got {type(param).__name__}; shard the model")
        if any(one.is_partial() for one in dtensor.placements):
            raise ShardingError(
                f"parameter {number} must be sharded or replicated, got {dtensor.placements}: the squares of partial "
                "sums do not add up to that of the sum; call its redistribute() first"
            )
        kinds.setdefault(split_of(dtensor), {})[str(number)] = dtensor.to_local()
    squares = _squares_over_ranks([*kinds.values()], [*kinds])
    return float(torch.stack([one.to(squares[0].device) for one in squares]).sum().sqrt()) if squares else 0.0


def unread_params_l2_norm(
    model: nn.Module | Sequence[nn.Module],
    model_config: Any = None,
    force_create_fp32_copy: bool = False,
    *,
    pg_collection: object = None,
) -> Tensor:
    """Like `calc_params_l2_norm`, but returns a 0-d float64 tensor on the parameters' device. Collective."""
    reshard(model)
    collection = getattr(chunks_of(model)[0], "pg_collection", None) or pg_collection
    found = {name: getattr(collection, name, None) for name in _GROUPS}
    groups = {name: group if has_others(group) else None for name, group in found.items()}
    ranks = [0 if groups[name] is None else dist.get_rank(groups[name]) for name in ("tp", "expt_tp")]
    uses_main = bool(getattr(model_config, "bf16", False)) and not force_create_fp32_copy
    params = measurable_parameters(model)
    counted: dict[_Kind, bool] = {}
    kinds: dict[_Kind, dict[str, Tensor]] = {}
    for name, param in params.items():
        kind, value = _kind_and_value(param, uses_main)
        counted[kind] = is_counted(name, param, *ranks)
        tensors = kinds.setdefault(kind, {})
        if value is not None:
            tensors[name] = local_part(value)
    sums = {(expert, part): _zero(params.values()) for expert in (False, True) for part in (False, True)}
    # for all kinds, counted here or not, since the other ranks of the mesh take part
    each = _squares_over_ranks([*kinds.values()], [kind.split for kind in kinds])
    for kind, squares in zip(kinds, each, strict=True):
        if counted[kind]:
            place = (kind.is_expert, kind.is_part)
            sums[place] = sums[place] + squares.to(sums[place].device)
    return _over_ranks(sums, groups).sqrt()


def param_is_not_shared(param: Tensor) -> bool:
    """Whether `param` counts on this rank: False if its attribute `shared` says that another rank counts it.

    This applies to an embedding tied across pipeline stages, a single parameter that exists on two of them.
    """
    return not getattr(param, "shared", False)


def is_expert(param: Any) -> bool:
    """Whether `param` belongs to experts that differ between ranks: its attribute `allreduce` is False."""
    return not getattr(param, "allreduce", True)


def is_counted(name: str, param: Any, tensor_rank: int, expert_tensor_rank: int) -> bool:
    """Whether this rank counts `param`, such that all ranks together count each parameter once.

    A parameter sharded over tensor-parallel ranks (`tensor_model_parallel`) counts on each of them, with its local
    shard; any other is identical on all of them and counts on the first.

    Args:
        name: name used in the error.
        param: the parameter.
        tensor_rank: this rank's index in the tensor-parallel group.
        expert_tensor_rank: the same for experts.

    Raises:
        ConfigError: if an expert is marked as shared, so that no rank would count it.
    """
    is_shared = not param_is_not_shared(param)
    if is_expert(param) and is_shared:
        raise ConfigError(
            f"the expert parameter {name} is marked as shared, but experts belong to one rank; set shared=False"
        )
    rank = expert_tensor_rank if is_expert(param) else tensor_rank
    return not is_shared and (getattr(param, "tensor_model_parallel", False) or rank == 0)


def _over_ranks(sums: Mapping[tuple[bool, bool], Tensor], groups: Mapping[str, Any]) -> Tensor:
    """The sum of all squares over ranks, from this rank's sums by (is expert, is optimizer shard)."""
    dense = sums[False, False] + _summed(sums[False, True], groups["dp_cp"])
    experts = sums[True, False] + _summed(sums[True, True], groups["expt_dp"])
    of_dense, of_experts = groups["mp"], groups["tp_ep_pp"]
    if None in (of_dense, of_experts):
        are_same = of_dense is of_experts
    else:
        are_same = dist.get_process_group_ranks(of_dense) == dist.get_process_group_ranks(of_experts)
    if are_same:
        return _summed(dense + experts, of_dense)
    return _summed(dense, of_dense) + _summed(experts, of_experts)


def _kind_and_value(param: Any, uses_main: bool) -> tuple[_Kind, Tensor | None]:
    """The kind of `param` and the tensor to measure; None if this rank's optimizer holds no shard of it."""
    has_main = uses_main and hasattr(param, "main_param")
    is_part = has_main and bool(getattr(param, "main_param_sharded", False))
    main = param.main_param if has_main else None
    value: Tensor | None = param if main is None and not is_part else main
    kind = _Kind(
        split=Split() if value is None else split_of(value),
        is_expert=is_expert(param),
        is_part=is_part,
        is_tensor_parallel=bool(getattr(param, "tensor_model_parallel", False)),
        is_shared=not param_is_not_shared(param),
    )
    return kind, value


def _fully_sharded(model: nn.Module | Sequence[nn.Module]) -> list[Tensor]:
    """The parameters of a model, all of which must be DTensors."""
    for chunk in [model] if isinstance(model, nn.Module) else model:
        stop = getattr(chunk, "stop_communication", None)
        if callable(stop):
            stop()
    params = measurable_parameters(model)
    for name, param in params.items():
        if as_dtensor(param) is None:
            raise ShardingError(
                f"with use_megatron_fsdp {name} must be a DTensor, got {type(param).__name__}; shard it"
            )
    return list(params.values())


def _squares_over_ranks(kinds: Sequence[Mapping[str, Tensor]], splits: Sequence[Split]) -> list[Tensor]:
    """The sum of the squares of all values of each kind over its mesh, 0-d float64."""
    squares = [local_norms(tensors).values.square().sum() for tensors in kinds]
    sharded = [place for place, split in enumerate(splits) if split.mesh is not None]
    if sharded:
        home = squares[sharded[0]].device
        sums = ShardSums([splits[place] for place in sharded])
        whole = sums(torch.stack([squares[place].to(home) for place in sharded]))
        for place, square in zip(sharded, whole.unbind(), strict=True):
            squares[place] = square
    return squares


def _summed(value: Tensor, group: Any) -> Tensor:
    """The sum of `value` over the ranks of `group`; unchanged for None."""
    if not has_others(group):
        return value
    if device_of(group).type == "cuda":  # the zero of a rank without parameters is on the CPU
        value = value.cuda()
    total = value.clone()
    dist.all_reduce(total, op=dist.ReduceOp.SUM, group=group)
    return total


def _zero(tensors: Iterable[Tensor]) -> Tensor:
    device = next((tensor.device for tensor in tensors), torch.device("cpu"))
    return torch.zeros((), dtype=torch.float64, device=device)
