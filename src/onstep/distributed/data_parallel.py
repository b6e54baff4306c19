"""Plain data parallelism: every rank holds the whole model and gradients are averaged."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from onstep.config import DistributedDataParallelConfig
from onstep.distributed.buffered import BufferedDataParallel, buffered_chunks
from onstep.distributed.gradient_exchange import BucketHook, LocalGradients, check_exchange, hook_of, notes_of
from onstep.distributed.refusals import check_undivided, check_version, check_world, exchanges
from onstep.distributed.shards import as_dtensor, has_ranks_of, parameter_groups, sharded_modules, world_size
from onstep.distributed.world import World
from onstep.errors import ConfigError, ShardingError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# torch 2.13 renamed the argument; the old name goes when 2.13 is the oldest supported
_RENAMED = "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
_SYNC_BUFFERS = "forward_sync_buffers" if _RENAMED else "broadcast_buffers"


def data_parallel(chunks: list[nn.Module], world: World, config: DistributedDataParallelConfig) -> list[nn.Module]:
    """Wrap the chunks so that the backward pass averages gradients over the ranks with different samples, if any.

    Collective: weights are broadcast from the first of these ranks.

    Args:
        chunks: the model chunks; one unless the model is split into several.
        world: the ranks of the run.
        config: the configuration of the run.

    Raises:
        ConfigError: for sparse gradients that are to be converted or checked.
        ShardingError: for a parameter that is sharded over ranks.
    """
    if world.size == 1:
        return chunks
    for chunk in chunks:
        check_exchange(config, chunk)
    check_ranks(chunks, world)
    if world.data.size == 1:
        return chunks
    notes, group = notes_of(config), world.data.group()
    hooks = [hook_of(config, chunk, world.data.size, notes, group) for chunk in chunks]
    for chunk in chunks:
        check_version(chunk)
    check_undivided(chunks, "wrapped in DistributedDataParallel, for which it must be whole on every rank")
    device_ids: list[Any] | None = [world.device] if world.device.type == "cuda" else None
    sync_buffers: dict[str, Any] = {_SYNC_BUFFERS: config.broadcast_buffers}
    wrapped = [
        FixedBuckets(
            chunk,
            device_ids=device_ids,
            process_group=group,
            bucket_cap_mb=config.bucket_cap_mb,
            find_unused_parameters=config.find_unused_parameters,
            **sync_buffers,
            gradient_as_bucket_view=config.gradient_as_bucket_view,
            static_graph=config.static_graph,
        )
        for chunk in chunks
    ]
    for chunk, hook in zip(wrapped, hooks, strict=True):
        if hook is not None:
            _exchange_by(hook, chunk)
            chunk.notes = notes
    return list(wrapped)


def _exchange_by(hook: BucketHook, chunk: DistributedDataParallel) -> None:
    # torch reads the annotations of a hook, and wants no strings there
    chunk.register_comm_hook(None, lambda state, bucket: hook(bucket))


class FixedBuckets(DistributedDataParallel):
    """Data parallelism whose gradient buckets are the same in every step of every process.

    torch sums the gradients of the first backward pass in one bucket, and those of later ones in buckets that follow
    the order in which gradients were ready. On three or more ranks, the order of a sum depends on its position in a
    bucket, so a resumed process would sum its first step in another order than a process that is in its second step.
    Here the buckets are formed before the first backward pass, from the last registered parameter to the first, about
    the order in which gradients are ready.
    """

    notes: LocalGradients | None = None
    """What this rank's gradients were before they were exchanged, if the configuration checks them."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._would_rebuild = bool(options.get("static_graph")) or not options.get("find_unused_parameters")
        super().__init__(*args, **options)
        if self._would_rebuild:
            self.reducer._push_all_rebuilt_params()
            self.reducer._rebuild_buckets()

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        parameters, expect_sparse_gradient = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        if self._would_rebuild:
            parameters.reverse()
            expect_sparse_gradient.reverse()
        return parameters, expect_sparse_gradient


def check_weights(chunks: Sequence[nn.Module]) -> None:
    """Refuse (ConfigError) weights without values, but for a model whose `hf_device_map` has them elsewhere.

    Args:
        chunks: the model chunks; one unless the model is split into several.
    """
    for chunk in chunks:
        if getattr(chunk, "hf_device_map", None) is not None:
            continue
        for name, tensor in chain(chunk.named_parameters(), chunk.named_buffers()):
            if is_lazy(tensor):
                raise ConfigError(
                    f"{name} has no shape yet, since it belongs to a lazy module (such as nn.LazyLinear); call the "
                    f"model once with a batch before training, which gives its parameters their shapes."
                )
            if tensor.is_inference() or torch.is_inference_mode_enabled():
                raise ConfigError(
                    f"{name} cannot be trained: {'it was made' if tensor.is_inference() else 'training runs'} under "
                    f"torch.inference_mode(), which records no gradients; remove it there, or use torch.no_grad()"
                )
            if tensor.is_meta:
                raise ConfigError(
                    f"{name} is on the device 'meta', so it has no values; load the model without device 'meta', or "
                    f"give it storage by model.to_empty(device='cpu') and then load or initialize all its weights."
                )


def check_ranks(chunks: Sequence[nn.Module], world: World) -> None:
    """Check that each rank of `world` may get samples of its own, as all ranks do, and that the weights have values.

    Args:
        chunks: the model chunks; one unless the model is split into several.

    Raises:
        ConfigError: for a world that is not the process group; for a model in DistributedDataParallel over other ranks
            than those of `world`; for weights on the device `meta`.
        ShardingError: for a parameter that is sharded over ranks that must get the same samples (tensor parallelism),
            or over some of the ranks only.
    """
    check_weights(chunks)
    check_world(world)
    if world_size() == 1:
        return
    for module in (module for chunk in chunks for module in chunk.modules()):
        if isinstance(module, DistributedDataParallel) and (ranks := module.process_group.size()) != world.data.size:
            raise ConfigError(
                f"the model averages gradients over {ranks} ranks, those of the group of its DistributedDataParallel, "
                f"but is trained as one of {world.data.size}: losses and norms would be wrong. Wrap it over the same "
                f"ranks, with onstep.distributed.data_parallel, or pass it without a wrapper if each rank trains by "
                f"itself."
            )
    meshes = {place: mesh for chunk in chunks for place, mesh in _data_meshes(chunk)}
    sharded_over = max((mesh.size() for mesh in meshes.values()), default=1)
    if world.size == 1 < sharded_over:
        raise ConfigError(
            f"the model is sharded by fully_shard over {sharded_over} ranks, but its world is this rank alone: losses "
            f"and norms would be wrong; make GlobalState without world=, or pass world=open_world(cfg.dist)."
        )
    for chunk in chunks:
        is_buffered = isinstance(chunk, BufferedDataParallel)
        for prefix, module in chunk.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                dtensor, mesh = as_dtensor(parameter), meshes.get((id(module), name))
                if dtensor is None or _is_divided_over(dtensor.device_mesh, mesh, world, is_buffered=is_buffered):
                    continue
                rule = f"weights that are divided along other axes are not supported ({world.place()})"
                if world.data.size == world.size:
                    rule = (
                        "each rank is trained on samples of its own, but ranks that are tensor-parallel must have the "
                        "same"
                    )
                raise ShardingError(
                    f"{f'{prefix}.{name}'.removeprefix('module.').removeprefix('.')} is a DTensor on "
                    f"{dtensor.device_mesh} with placements {dtensor.placements}, which is not data parallelism over "
                    f"all {world.size} ranks: {rule}. Load the model without tp_plan or parallelize_module: Onstep "
                    f"divides its tensors itself, by parallel.tensor_model_parallel_size; or shard it by fully_shard "
                    f"over all ranks."
                )


def _is_divided_over(mesh: DeviceMesh, data: DeviceMesh | None, world: World, *, is_buffered: bool) -> bool:
    """Whether a parameter is divided between all ranks of a world in ways that a training of these ranks knows.

    Args:
        mesh: that of the parameter.
        data: the part of it that FSDP2 divides it over; None if it does not.
        world: the ranks.
        is_buffered: whether ranks divide its updates.
    """
    if data is None:  # replicas of stages are summed by the engine of a pipeline
        is_alone = is_buffered or world.data.size == 1 or world.sizes.pp > 1
        return is_alone and world.sizes.tp > 1 and has_ranks_of(mesh, world.part_of_mesh("tp"))
    return data.size() == world.data.size and mesh.size() == world.data.size * world.sizes.tp


def _data_meshes(chunk: nn.Module) -> Iterator[tuple[tuple[int, str], DeviceMesh]]:
    """The mesh over which FSDP2 shards or replicates each parameter, by the id of its module and its name there."""
    for module in sharded_modules(chunk):
        for group in parameter_groups(module):
            for one in group.fsdp_params:
                info = one._module_info
                owners, names = [info.module, *info.shared_modules], [info.param_name, *info.shared_param_names]
                for owner, name in zip(owners, names, strict=True):
                    yield (id(owner), name), one.mesh_info.mesh


def has_fixed_buckets(chunk: nn.Module) -> bool:
    """Whether a chunk sums gradients over ranks in the same order in every process; False for torch's own DDP.

    Args:
        chunk: a model chunk.
    """
    is_plain = isinstance(chunk, DistributedDataParallel) and not isinstance(chunk, FixedBuckets)
    return not is_plain or bool(chunk.find_unused_parameters and not chunk.static_graph)


def is_bare(chunk: nn.Module) -> bool:
    """Whether no part of a chunk has a wrapper that exchanges gradients: DDP, FSDP, Megatron-Core's or DeepSpeed's.

    Args:
        chunk: a model chunk.
    """
    return not any(map(exchanges, chunk.modules()))


def no_sync(chunks: list[nn.Module]) -> AbstractContextManager[object]:
    """Backward passes in this context keep their gradients local; the next one outside averages the sum.

    With a static graph, which torch cannot combine with that, each of them averages the sum.

    Args:
        chunks: the model chunks; one unless the model is split into several.
    """
    wrapped: list[DistributedDataParallel | BufferedDataParallel] = [*buffered_chunks(chunks)]
    wrapped += [chunk for chunk in chunks if isinstance(chunk, DistributedDataParallel) and not chunk.static_graph]
    if not wrapped:
        return nullcontext()
    stack = ExitStack()
    for chunk in wrapped:
        stack.enter_context(chunk.no_sync())
    return stack
