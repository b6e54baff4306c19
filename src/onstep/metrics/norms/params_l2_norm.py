"""The L2 norm of all parameters of a model, whichever ranks hold them: each logical parameter counts once.

Squares are summed in float64, which holds those of all smaller types; of float64 parameters, values above 1e150 or
below 1e-150 leave its range (`onstep.metrics.norms.parameter_norms` measures those).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onstep.distributed.shards import Split, as_dtensor, local_part, split_of
from onstep.errors import ConfigError, ShardingError
from onstep.metrics.norms.named_parameters import chunks_of, measurable_parameters, reshard
from onstep.metrics.norms.parameter_norms import local_norms
from onstep.metrics.reductions import device_of, has_others

_GROUPS = ("tp", "expt_tp", "dp_cp", "expt_dp", "mp", "tp_ep_pp")


class _Kind(NamedTuple):
    """What parameters have in common that are summed and reduced together; the same on all ranks that share them."""

    split: Split
    is_expert: bool
    is_part: bool
    """It is the part that this rank's optimizer keeps (`main_param_sharded`)."""
    is_tensor_parallel: bool
    is_shared: bool


def calc_params_l2_norm(
    model: nn.Module | Sequence[nn.Module],
    model_config: Any,
    use_megatron_fsdp: bool = False,
    force_create_fp32_copy: bool = False,
) -> float:
    """The L2 norm of all parameters of a model over all ranks that hold it. Collective; reads the device once.

    Each logical parameter counts once. Tensors that are split as DTensors (FSDP2, tensor parallelism) are summed over
    their mesh. Where the first chunk carries process groups as `pg_collection` (Megatron's: tp, expt_tp, dp_cp,
    expt_dp, mp, tp_ep_pp; one that is missing or None has no other ranks), parameters are told apart by Megatron's
    marks: `tensor_model_parallel` ones are parts and count on every tensor-parallel rank, others on the first;
    `shared` ones do not count; experts (`allreduce` is False) are summed over the groups of the experts. Without
    groups and marks it is the norm of the parameters there are.

    Args:
        model: the model or its chunks, a tied parameter counted once.
        model_config: with a true `bf16`, the float32 `main_param` of a parameter is measured in its place where there
            is one; with `main_param_sharded` that is this rank's part, which is summed over the data-parallel ranks.
        use_megatron_fsdp: all parameters must be DTensors, and a chunk's `stop_communication()` is called first.
        force_create_fp32_copy: measure the parameters themselves, also where there is a `main_param`. No copy is
            needed for it: whatever the type, sums are in float64.

    Raises:
        ConfigError: an expert is marked as shared.
        ShardingError: a parameter is no DTensor with `use_megatron_fsdp`.
    """
    if use_megatron_fsdp:
        return calc_dtensor_params_l2_norm(_fully_sharded(model))
    return float(unread_params_l2_norm(model, model_config, force_create_fp32_copy))


def calc_dtensor_params_l2_norm(params: Iterable[Tensor]) -> float:
    """The L2 norm of DTensors, whole, on every rank. One collective for each way of splitting and mesh dimension.

    Args:
        params: the DTensors, in the same order on all ranks of their mesh.

    Raises:
        ShardingError: a tensor is no DTensor, or ranks hold summands of it (`Partial`), whose squares do not add up.
    """
    kinds: dict[Split, dict[str, Tensor]] = {}
    for number, param in enumerate(params):
        dtensor = as_dtensor(param)
        if dtensor is None:
            raise ShardingError(f"parameter {number} must be a DTensor, got {type(param).__name__}; shard the model")
        if any(one.is_partial() for one in dtensor.placements):
            raise ShardingError(
                f"parameter {number} must be split or replicated, got {dtensor.placements}: the squares of summands "
                "are not those of the sum; call its redistribute() first"
            )
        kinds.setdefault(split_of(dtensor), {})[str(number)] = dtensor.to_local()
    total = _zero(())
    for split, tensors in kinds.items():
        total = total.to(next(iter(tensors.values())).device) + _squares(tensors, split)
    return float(total.sqrt())


def unread_params_l2_norm(
    model: nn.Module | Sequence[nn.Module], model_config: Any = None, force_create_fp32_copy: bool = False
) -> Tensor:
    """What `calc_params_l2_norm` gives, as a 0-d float64 tensor on the device of the parameters. Collective."""
    reshard(model)
    collection = getattr(chunks_of(model)[0], "pg_collection", None)
    found = {name: getattr(collection, name, None) for name in _GROUPS}
    groups = {name: group if has_others(group) else None for name, group in found.items()}
    ranks = [0 if groups[name] is None else dist.get_rank(groups[name]) for name in ("tp", "expt_tp")]
    takes_main = bool(getattr(model_config, "bf16", False)) and not force_create_fp32_copy
    params = measurable_parameters(model)
    counted: dict[_Kind, bool] = {}
    kinds: dict[_Kind, dict[str, Tensor]] = {}
    for name, param in params.items():
        kind, value = _kind_and_value(param, takes_main)
        counted[kind] = is_counted(name, param, *ranks)
        tensors = kinds.setdefault(kind, {})
        if value is not None:
            tensors[name] = local_part(value)
    sums = {(expert, part): _zero(params.values()) for expert in (False, True) for part in (False, True)}
    for kind, tensors in kinds.items():
        squares = _squares(tensors, kind.split)  # of all, since the other ranks of the mesh take part
        if counted[kind]:
            place = (kind.is_expert, kind.is_part)
            sums[place] = sums[place] + squares.to(sums[place].device)
    return _over_ranks(sums, groups).sqrt()


def param_is_not_shared(param: Tensor) -> bool:
    """Whether `param` counts here: False for one whose attribute `shared` says that another rank counts it.

    So it is with an embedding that is tied across pipeline stages: it is on two of them, and one parameter.
    """
    return not getattr(param, "shared", False)


def is_expert(param: Any) -> bool:
    """Whether `param` belongs to experts that differ between ranks: its attribute `allreduce` is False."""
    return not getattr(param, "allreduce", True)


def is_counted(name: str, param: Any, tensor_rank: int, expert_tensor_rank: int) -> bool:
    """Whether this rank counts `param`, so that all ranks of the model together count each parameter once.

    A parameter that is split over tensor-parallel ranks (`tensor_model_parallel`) counts on each of them, with its part
    there; any other is the same on all of them, and counts on the first.

    Args:
        name: for the error.
        param: a parameter.
        tensor_rank: this rank's place in the group of tensor parallelism.
        expert_tensor_rank: the same for experts.

    Raises:
        ConfigError: experts are marked as shared, which nothing could count.
    """
    is_shared = not param_is_not_shared(param)
    if is_expert(param) and is_shared:
        raise ConfigError(
            f"the expert parameter {name} is marked as shared, but experts belong to one rank; set shared=False"
        )
    rank = expert_tensor_rank if is_expert(param) else tensor_rank
    return not is_shared and (getattr(param, "tensor_model_parallel", False) or rank == 0)


def _over_ranks(sums: Mapping[tuple[bool, bool], Tensor], groups: Mapping[str, Any]) -> Tensor:
    """The sum of all squares, from this rank's by (of experts, of parts that optimizers keep)."""
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


def _kind_and_value(param: Any, takes_main: bool) -> tuple[_Kind, Tensor | None]:
    """What is measured for `param`; None where this rank's optimizer keeps no part of it."""
    has_main = takes_main and hasattr(param, "main_param")
    is_part = has_main and bool(getattr(param, "main_param_sharded", False))
    main = param.main_param if has_main else None
    value: Tensor | None = param if main is None and not is_part else main
    kind = _Kind(
        split=() if value is None else split_of(value),
        is_expert=is_expert(param),
        is_part=is_part,
        is_tensor_parallel=bool(getattr(param, "tensor_model_parallel", False)),
        is_shared=not param_is_not_shared(param),
    )
    return kind, value


def _fully_sharded(model: nn.Module | Sequence[nn.Module]) -> list[Tensor]:
    """The parameters of a model of which every one is a DTensor."""
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


def _squares(tensors: Mapping[str, Tensor], split: Split) -> Tensor:
    """The sum of the squares of all values over the mesh that they are split over, 0-d float64."""
    squares = local_norms(tensors).values.square().sum()
    for mesh, dim in split:
        squares = _summed(squares, mesh.get_group(dim))
    return squares


def _summed(value: Tensor, group: Any) -> Tensor:
    """The sum of `value` over the ranks of `group`; None has no others."""
    if not has_others(group):
        return value
    if device_of(group).type == "cuda":  # a rank without parameters has its zero on the CPU
        value = value.cuda()
    total = value.clone()
    dist.all_reduce(total, op=dist.ReduceOp.SUM, group=group)
    return total


def _zero(tensors: Iterable[Tensor]) -> Tensor:
    device = next((tensor.device for tensor in tensors), torch.device("cpu"))
    return torch.zeros((), dtype=torch.float64, device=device)
