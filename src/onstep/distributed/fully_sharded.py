"""Divides a model between ranks by torch's `fully_shard` (FSDP2): block by block, with sums of gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from onstep.config import ConfigContainer, DistributedDataParallelConfig
from onstep.config.named_functions import function_of, names_function
from onstep.config.suggestions import listed, nearest, shown
from onstep.distributed.beside_compute import gather_beside, scatter_beside
from onstep.distributed.pipeline.seats import seat_of
from onstep.distributed.refusals import check_undivided, check_version
from onstep.distributed.shards import as_dtensor, parameter_groups
from onstep.distributed.tensor_parallel import dimension_beside
from onstep.distributed.world import World
from onstep.errors import ConfigError

FindBlocks = Callable[[nn.Module], Iterable[nn.Module]]
"""Returns the blocks of a model: modules in it whose weights are gathered together."""
_COMPUTED_IN = {"bf16_mixed": torch.bfloat16, "fp16_mixed": torch.float16}
_LOW_PRECISION = (torch.bfloat16, torch.float16)
_NAMES_SHOWN = 8
_DIVIDED: WeakSet[nn.Module] = WeakSet()
"""The chunks that were divided here."""


def fully_sharded(
    chunks: list[nn.Module],
    world: World,
    config: ConfigContainer,
    ddp: DistributedDataParallelConfig | None = None,
    find_blocks: FindBlocks | None = None,
) -> list[nn.Module]:
    """Divide the chunks between the ranks of `dp_shard`, in place, once for each replica along `dp_replicate`.

    Gradients are summed over these ranks. In mixed precision, the weights that a block gathers are in 16 bits: nothing
    is computed under autocast. Collective: weights are broadcast from the first rank, unless they are on `meta`.

    Args:
        chunks: the model chunks; one unless the model is split into several.
        world: the ranks of the run.
        config: the configuration of the run.
        ddp: instead of `config.ddp`.
        find_blocks: finds the blocks of a chunk; None follows `fsdp.wrap`.

    Raises:
        ConfigError: for a model without blocks, an unknown class of blocks, a parameter that is shared between two
            blocks, models that differ between the ranks, or one that an earlier training has divided in another way.
        ShardingError: for a parameter that is sharded over ranks.
    """
    ddp = config.ddp if ddp is None else ddp
    for chunk in chunks:
        if chunk in _DIVIDED:  # by an earlier training
            _join(chunk, _mesh_of(world))
            continue
        check_version(chunk)
        check_undivided(
            [chunk], "divided between ranks here", along=world.part_of_mesh("tp") if world.sizes.tp > 1 else None
        )
        seat = seat_of(chunk)
        if find_blocks is not None:
            blocks = list(find_blocks(chunk))
        else:
            blocks = blocks_of(chunk, config.fsdp.wrap) if seat is None or seat.layers else []
        check_shared(chunk, blocks)
        check_parameters(chunk)
        check_alike(chunk, world)
        broadcast(chunk, world)
        _shard(chunk, blocks, world, config, ddp)
        _DIVIDED.add(chunk)
    return chunks


def _shard(
    chunk: nn.Module,
    blocks: list[nn.Module],
    world: World,
    config: ConfigContainer,
    ddp: DistributedDataParallelConfig,
) -> None:
    mesh, options = _mesh_of(world), config.fsdp
    offloads = options.cpu_offload
    given: dict[str, Any] = {
        "mesh": mesh,
        "offload_policy": CPUOffloadPolicy(pin_memory=world.device.type == "cuda") if offloads else OffloadPolicy(),
    }
    if world.sizes.tp > 1:
        given["shard_placement_fn"] = partial(dimension_beside, world.sizes.dp_shard)
    policy, reshard = policy_of(config.mixed_precision, ddp, chunk), options.reshard_after_forward
    for block in blocks:
        fully_shard(block, reshard_after_forward=reshard, mp_policy=policy, **given)
    widened = policy if policy.param_dtype is None else _with_wide_results(policy)
    fully_shard(chunk, reshard_after_forward=reshard, mp_policy=widened, **given)
    modules = [module for module in (*blocks, chunk) if isinstance(module, FSDPModule)]
    for module in modules:
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # torch scales within a sum otherwise, which gloo cannot
        if ddp.find_unused_parameters:
            module.set_reduce_scatter_unused_params(True)
    if world.device.type == "cpu" and not offloads:
        gather_beside(modules)
        sums_in_passes = seat_of(chunk) is None  # the sums of a stage begin after its passes
        if (
            sums_in_passes
            and policy.param_dtype is None
            and policy.reduce_dtype is None
            and world.sizes.dp_replicate == 1
        ):
            scatter_beside(modules)
    if options.prefetch:
        _prefetch([block for block in blocks if isinstance(block, FSDPModule)], options.prefetch)


def _join(chunk: nn.Module, mesh: DeviceMesh) -> None:
    """Let a chunk that an earlier training has divided use the groups of this one; torch has noted those of that one.

    Raises:
        ConfigError: if this training divides it in another way.
    """
    groups = [group for one in chunk.modules() if isinstance(one, FSDPModule) for group in parameter_groups(one)]
    for group in groups:
        if group.mesh_info.mesh != mesh:
            raise ConfigError(
                f"an earlier training has divided the model over {group.mesh_info.mesh}, and this one is to divide it "
                f"over {mesh}; build the model again."
            )
        parts = group.post_forward_mesh_info
        if parts not in (None, group.mesh_info):  # fsdp.reshard_after_forward=<number of ranks>
            old = parts.mesh
            parts.mesh = DeviceMesh(old.device_type, old.mesh, mesh_dim_names=old.mesh_dim_names)
            parts.__post_init__()
        group.mesh_info.__post_init__()


def _mesh_of(world: World) -> DeviceMesh:
    """The ranks that hold one replica in shards; with several replicas, all ranks with different samples."""
    return world.part_of_mesh(*(["dp_shard"] if world.sizes.dp_replicate == 1 else ["dp_replicate", "dp_shard"]))


def policy_of(
    mixed_precision: str | None, ddp: DistributedDataParallelConfig, chunk: nn.Module
) -> MixedPrecisionPolicy:
    """The types in which blocks compute, and in which gradients are summed.

    Args:
        mixed_precision: the precision of the run.
        ddp: the section of the configuration.
        chunk: the model chunk.
    """
    computed_in = None if mixed_precision is None else _COMPUTED_IN[mixed_precision]
    is_low = any(one.dtype in _LOW_PRECISION for one in chunk.parameters() if one.requires_grad)
    summed_in: torch.dtype | None = None
    if ddp.grad_reduce_in_bf16:
        summed_in = torch.bfloat16
    elif (computed_in is not None and not is_low) or (is_low and ddp.grad_reduce_in_fp32):
        summed_in = torch.float32
    return MixedPrecisionPolicy(param_dtype=computed_in, reduce_dtype=summed_in)


def _with_wide_results(policy: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    """For the whole model: what it returns is in float32, in which losses are computed."""
    return MixedPrecisionPolicy(policy.param_dtype, policy.reduce_dtype, output_dtype=torch.float32)


def _prefetch(blocks: list[FSDPModule], ahead: int) -> None:
    """Gather the weights of the blocks that come next; blocks are called in the order in which they are registered."""
    for number, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[number + 1 : number + 1 + ahead])
        block.set_modules_to_backward_prefetch(blocks[max(0, number - ahead) : number][::-1])


def blocks_of(model: nn.Module, classes: list[str] | None = None) -> list[nn.Module]:
    """The blocks of a model, each before those that contain it.

    Args:
        model: a model, perhaps one that contains the model which names its blocks.
        classes: the names of the blocks' classes, or the one name of a function, `module:function`, that returns the
            blocks of a model; None is what the model itself names (`_no_split_modules`), or else the modules in its
            outermost lists.

    Raises:
        ConfigError: if no module is of one of these classes, the function returns something else than modules of the
            model, or there are no blocks.
    """
    if classes and names_function(classes[0]):
        found = _found_by(classes[0], model)
    else:
        found = _of_classes(model, classes) if classes else _named_by_model(model) or list(_in_lists(model))
    blocks = [one for one in found if one is not model and next(one.parameters(), None) is not None]
    if not classes:
        blocks = _without_shared(model, blocks)
    if blocks:
        return blocks
    kinds = listed(_classes_inside(model), _NAMES_SHOWN)
    if classes:
        raise ConfigError(
            f"fsdp.wrap names no module with parameters inside {type(model).__name__}; set fsdp.wrap to the classes of "
            f"its blocks, from {kinds or 'those of another model'}."
        )
    raise ConfigError(
        f"{type(model).__name__} has no blocks to divide between ranks: it names none (_no_split_modules), and has no "
        f"nn.ModuleList; set fsdp.wrap to the classes of its blocks, from {kinds or 'those of another model'}."
    )


def _found_by(name: str, model: nn.Module) -> list[nn.Module]:
    """What a function of the user's returns, each block before those that contain it."""
    returned = function_of("fsdp.wrap", name)(model)
    found = list(returned) if isinstance(returned, Iterable) else [returned]
    order = {id(module): number for number, module in enumerate(_inner_first(model))}
    for one in found:
        if id(one) not in order:
            raise ConfigError(
                f"fsdp.wrap={name} returned {shown(one)} among the blocks of {type(model).__name__}, which must be "
                f"modules in it; return them as a list."
            )
    if not found:
        raise ConfigError(f"fsdp.wrap={name} returned no blocks of {type(model).__name__}; return modules in it.")
    return sorted(found, key=lambda one: order[id(one)])


def _without_shared(model: nn.Module, blocks: list[nn.Module]) -> list[nn.Module]:
    """The blocks that share no parameter with the rest of the model, as an embedding with tied weights does."""
    inside = {id(module) for block in blocks for module in block.modules()}
    outside = {
        id(parameter)
        for module in model.modules()
        if id(module) not in inside
        for parameter in module.parameters(recurse=False)
    }
    return [block for block in blocks if outside.isdisjoint(map(id, block.parameters()))]


def _of_classes(model: nn.Module, classes: list[str]) -> list[nn.Module]:
    kinds = {kind.__name__ for module in model.modules() for kind in _kinds(module)}
    for name in classes:
        if name not in kinds:
            own = _classes_inside(model)
            hint = nearest(name, own) or f" Its classes are {listed(own, _NAMES_SHOWN)}."
            raise ConfigError(f"fsdp.wrap names {shown(name)}, a class of no module in {type(model).__name__}.{hint}")
    wanted = set(classes)
    return [one for one in _inner_first(model) if not wanted.isdisjoint(kind.__name__ for kind in _kinds(one))]


def _classes_inside(model: nn.Module) -> list[str]:
    """Names of the classes of the modules inside a model that may be blocks."""
    inside = {type(one) for one in model.modules() if one is not model}
    return sorted(kind.__name__ for kind in inside - {nn.ModuleList, nn.ModuleDict})


def _kinds(module: nn.Module) -> Iterator[type]:
    """Its class, and what this is derived from below `nn.Module`."""
    return (kind for kind in type(module).__mro__ if issubclass(kind, nn.Module) and kind is not nn.Module)


def _named_by_model(model: nn.Module) -> list[nn.Module]:
    for module in model.modules():
        if names := getattr(module, "_no_split_modules", None):
            wanted = set(names)
            return [one for one in _inner_first(module) if type(one).__name__ in wanted]
    return []


def _in_lists(module: nn.Module) -> Iterator[nn.Module]:
    """The modules in the outermost lists in a module."""
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from child.children()
        else:
            yield from _in_lists(child)


def _inner_first(module: nn.Module) -> Iterator[nn.Module]:
    seen: set[int] = set()

    def walk(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            if id(child) not in seen:
                seen.add(id(child))
                yield from walk(child)
        yield module

    return walk(module)


def check_shared(model: nn.Module, blocks: list[nn.Module]) -> None:
    """Refuse (ConfigError) a parameter of a block that is also used outside of it, where it would not be gathered.

    Args:
        model: the model.
        blocks: its blocks.
    """
    holders: dict[int, nn.Module] = {}
    for block in reversed(blocks):  # an inner block, which comes before the outer one, has the last word
        holders.update((id(module), block) for module in block.modules())
    first: dict[int, tuple[str, nn.Module]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(recurse=False):
            here = f"{prefix}.{name}".removeprefix("."), holders.get(id(module), model)
            there = first.setdefault(id(parameter), here)
            if there[1] is not here[1]:
                raise ConfigError(
                    f"{there[0]} and {here[0]} are one parameter, in {_named(model, there[1])} and "
                    f"{_named(model, here[1])}, but a block gathers its weights for itself; set fsdp.wrap to a class "
                    f"that contains both, or give each weights of its own."
                )


def check_parameters(model: nn.Module) -> None:
    """Refuse (ConfigError) quantized parameters, and those without a dimension.

    Args:
        model: the model.
    """
    for name, one in model.named_parameters():
        if not one.is_floating_point() or type(one).__module__.partition(".")[0] == "bitsandbytes":
            raise ConfigError(
                f"{name} is a quantized parameter ({type(one).__name__} of {one.dtype}), whose kernels require the "
                f"whole of it on each rank; load the weights in bfloat16, or train replicas in place of shards."
            )
        if one.dim() == 0:
            raise ConfigError(
                f"{name} has no dimension, so it cannot be divided between ranks; make it a vector of one element, or "
                f"train replicas in place of shards."
            )


def _named(model: nn.Module, block: nn.Module) -> str:
    name = next(name for name, module in model.named_modules() if module is block)
    return f"block {name}" if name else "the model outside of its blocks"


def make_room(chunk: nn.Module, world: World) -> None:
    """Replace parameters on `meta` that the first rank has, for `fully_sharded` to broadcast. Collective.

    transformers leaves them there on other ranks with `cpu_ram_efficient_loading`.

    Args:
        chunk: a whole model.
        world: the ranks of the run.
    """
    of_first = set(world.share([name for name, one in chunk.named_parameters() if not one.is_meta]))
    lacking = {id(one) for name, one in chunk.named_parameters() if one.is_meta and name in of_first}
    made: dict[int, nn.Parameter] = {}
    for module in chunk.modules() if lacking else ():
        for name, one in module.named_parameters(recurse=False):
            if id(one) in lacking:
                empty = torch.empty_like(one, device=world.device)
                setattr(module, name, made.setdefault(id(one), nn.Parameter(empty, one.requires_grad)))


def check_alike(chunk: nn.Module, world: World) -> None:
    """Refuse (ConfigError) models that differ between the ranks, on all of them. Collective.

    Args:
        chunk: a whole model, or a stage, of which the ranks along `pp` have others.
        world: the ranks of the run.
    """
    found = world.gather(
        [(name, tuple(one.shape), str(one.dtype), one.is_meta) for name, one in chunk.named_parameters()]
    )
    for part in world.parts("dp_replicate", "dp_shard", "cp", "tp"):
        first = world.rank if world.rank in part else part[0]
        for rank in part:
            own, other = found[first], found[rank]
            if other == own:
                continue
            here, there = next(((a, b) for a, b in zip(own, other, strict=False) if a != b), (len(own), len(other)))
            raise ConfigError(
                f"the model of {world.place(rank)} differs from that of {world.place(first)}: it has {there}, here is "
                f"{here}; build the same model on all ranks."
            )


@torch.no_grad()
def broadcast(chunk: nn.Module, world: World) -> None:
    """Give all ranks the weights and buffers of the first. Collective.

    Args:
        chunk: a whole model.
        world: the ranks of the run.
    """
    if world.data.size == 1:
        return
    seen: set[int] = set()
    for tensor in (*chunk.parameters(), *chunk.buffers()):
        if id(tensor) in seen or tensor.is_meta or as_dtensor(tensor) is not None:
            continue
        seen.add(id(tensor))
        sent = tensor.detach().to(world.device)
        sent = sent if sent.is_contiguous() else sent.contiguous()
        dist.broadcast(sent, group=world.data.group(), group_src=0)
        if sent.data_ptr() != tensor.data_ptr():
            tensor.copy_(sent)
