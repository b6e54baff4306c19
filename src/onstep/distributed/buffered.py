"""Data parallelism whose ranks divide the updates: gradients are summed in buckets, and updated parameters gathered."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle

from onstep.config import DistributedDataParallelConfig
from onstep.config.suggestions import listed
from onstep.distributed.buckets import Bucket, Member, Ranks, room
from onstep.distributed.gathers import Gathers
from onstep.distributed.gradient_exchange import notes_of
from onstep.distributed.mxfp8_buckets import MXFP8Bucket
from onstep.distributed.refusals import check_undivided
from onstep.distributed.shard_sums import sum_together
from onstep.distributed.shards import held_part, is_sharded
from onstep.distributed.world import World
from onstep.errors import ConfigError

_WRAPPERS: WeakKeyDictionary[nn.Module, ReferenceType[BufferedDataParallel]] = WeakKeyDictionary()
"""The wrappers that were made here, by the models in them."""
_LOW_PRECISION = (torch.bfloat16, torch.float16)
_NAMES_SHOWN = 8
_SUMS_AT_ONCE = 4
"""Of buckets that are summed after the backward pass."""


class BufferedDataParallel(nn.Module):
    """A model chunk that is whole on every rank, of which each rank updates some rows: see `DistributedOptimizer`.

    Where the ranks of `tp` divide the tensors of layers, those of data divide the updates of what each of them holds.

    Its trained parameters are views of flat tensors, one for each type, and so are their gradients. Without hooks,
    parameters are gathered as soon as they are updated; with them (`enable_forward_pre_hook`), while the forward pass
    runs, and each module waits for its own.

    With `ddp.fp8_param_gather`, each rank has float32 masters of its rows beside the model, whose parameters hold what
    is left of all rows in MXFP8. What something else writes to a parameter in place becomes the master at the next
    forward pass, update or save.

    Args:
        module: the model.
        ranks: the ranks that divide the updates.
        ddp_config: the section `ddp`.
    """

    def __init__(self, module: nn.Module, ranks: Ranks, ddp_config: DistributedDataParallelConfig) -> None:
        super().__init__()
        self.module: nn.Module = module
        self.ddp_config = ddp_config
        self.ranks = ranks
        self._gradients: list[Tensor] = []
        self.buckets: list[Bucket] = list(self._divided())
        """From the last registered parameter to the first, about the order in which gradients are ready."""
        self._in_mxfp8 = [one for one in self.buckets if isinstance(one, MXFP8Bucket)]
        self.gathers = Gathers(module, self.buckets)
        self._bucket_of = {
            id(one.parameter): place for place, bucket in enumerate(self.buckets) for one in bucket.members
        }
        self._waiting: list[set[int]] = []
        """The parameters whose gradients each bucket waits for."""
        self._next = 0
        """The first bucket whose sum has not begun."""
        self.notes = notes_of(ddp_config)
        """What this rank's gradients were before they were summed, if the configuration checks them."""
        self._used: set[int] = set()
        """The parameters with a gradient since the buffers were cleared."""
        self._is_summed = False
        self._exchanges = True
        self._arrivals = [
            one.parameter.register_post_accumulate_grad_hook(_Arrival(self, one))  # type: ignore[no-untyped-call]
            for one in self.members
        ]
        self.zero_grad_buffer()

    @property
    def pipeline_seat(self) -> object:
        """Which stage of a pipeline the model is; None for a whole one."""
        return getattr(self.module, "pipeline_seat", None)

    @property
    def members(self) -> list[Member]:
        """The trained parameters."""
        return [one for bucket in self.buckets for one in bucket.members]

    @property
    def masters(self) -> dict[int, nn.Parameter]:
        """By the id of each parameter, the float32 rows of this rank, as a DTensor; empty without MXFP8."""
        return {id(one.parameter): one.shard for bucket in self._in_mxfp8 for one in bucket.members}

    def take_written(self) -> None:
        """Let what has been written to parameters in place be their masters; not collective."""
        for bucket in self._in_mxfp8:
            bucket.take_written()

    def take_values(self) -> None:
        """Let the values of all parameters be their masters, after a load; not collective."""
        for bucket in self._in_mxfp8:
            bucket.take_values()

    @property
    def remove_forward_pre_hook_handles(self) -> dict[nn.Module, RemovableHandle]:
        """The forward pre-hooks that are on, by module; Megatron-Core's name."""
        return self.gathers.handles

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model, and note the order in which it uses its parameters, the first time."""
        self.take_written()
        if self.gathers.is_noted or not self.ddp_config.overlap_param_gather:
            return self.module(*args, **kwargs)
        with self.gathers.watching():
            return self.module(*args, **kwargs)

    def enable_forward_pre_hook(self) -> None:
        """Let later updates only begin their gathers, and modules wait for what they use.

        Raises:
            RuntimeError: if the hooks are on.
        """
        self.gathers.hook()

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        """Let later updates wait for their gathers.

        Args:
            param_sync: whether to gather, and wait for, what has been updated. Collective.

        Raises:
            RuntimeError: if the hooks are off.
        """
        self.gathers.unhook()
        if param_sync:
            self.start_param_sync(force_sync=True)

    def zero_grad_buffer(self) -> None:
        """Clear the gradients, and let the next backward passes fill the buffers."""
        if self._used or self._is_summed or not self._has_views():
            if any(bucket.holds_gather for bucket in self._in_mxfp8):
                for bucket in self._in_mxfp8:
                    bucket.clear_gradients()
            else:
                for flat in self._gradients:
                    flat.zero_()
        for one in self.members:
            one.shard.grad = one.parameter.main_grad = None  # type: ignore[attr-defined]
            one.parameter.grad = one.first_grad if one.parameter.requires_grad else None
        self._used.clear()
        self._is_summed, self._next = False, 0
        self._waiting = [
            {id(one.parameter) for one in bucket.members if one.parameter.requires_grad} for bucket in self.buckets
        ]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in this context do not begin to sum gradients over the ranks."""
        before, self._exchanges = self._exchanges, False
        try:
            yield
        finally:
            self._exchanges = before

    def join(self, ranks: Ranks) -> None:
        """Use the process groups of another world.

        Args:
            ranks: the same as before, in that world.
        """
        self.ranks = ranks
        for bucket in self.buckets:
            bucket.join(ranks)

    def release(self) -> None:
        """Let go of the parameters: their gradients do not come here any more."""
        for handle in self._arrivals:
            handle.remove()
        for one in self.members:
            one.parameter.grad = None

    def take_gradients(self) -> None:
        """Take what passes have left that call no hooks, as those of zero-bubble schedules; what has none has zeros."""
        for one in self.members:
            if one.parameter.requires_grad:
                self._used.add(id(one.parameter))
                one.take_from_parameter()

    def finish_grad_sync(self) -> None:
        """Sum the gradients over the ranks, if that is not done: they are then those of the shards. Collective.

        Raises:
            ConfigError: for a parameter without a gradient, unless `ddp.find_unused_parameters` looks for them.
        """
        if self._is_summed:
            return
        self.finish_param_sync()
        self.take_written()
        used = self._used_anywhere()
        begun = deque(self.buckets[: self._next])
        for bucket in self.buckets[self._next :]:
            if len(begun) >= _SUMS_AT_ONCE:  # as those in flight have copies of the gradients
                begun.popleft().finish_sum()
            self._start_sum(bucket)
            begun.append(bucket)
        for bucket in begun:
            bucket.finish_sum()
        summands: dict[ProcessGroup, list[Tensor]] = {}
        for one in self.members:
            if one.has_summands and id(one.parameter) in used:
                summands.setdefault(one.summing, []).append(held_part(one.shard_gradient))
        for group, parts in summands.items():
            sum_together(parts, partial(dist.all_reduce, group=group))
        for one in self.members:
            one.parameter.grad = None  # this rank's summands, which nobody is to take for the sum
            if id(one.parameter) in used:
                one.shard.grad = one.parameter.main_grad = one.shard_gradient  # type: ignore[attr-defined]
        self._is_summed = True

    def start_param_sync(self, *, force_sync: bool = False) -> None:
        """Gather the parameters after an update; with hooks, only begin to. Collective.

        Args:
            force_sync: whether to wait for all of them, also with hooks.
        """
        self.gathers.start()
        if force_sync or not self.gathers.handles:
            self.gathers.finish()

    def finish_param_sync(self) -> None:
        """Wait for the gathers that have begun; not collective."""
        self.gathers.finish()

    def mark_updated(self) -> None:
        """Note that this rank has updated its rows."""
        for bucket in self.buckets:
            bucket.is_current = False

    def arrived(self, member: Member) -> None:
        """Take note of a gradient of a backward pass; with `ddp.overlap_grad_reduce`, begin sums that are ready.

        Raises:
            ConfigError: for a second gradient after the sum of its bucket has begun.
        """
        key = id(member.parameter)
        self._used.add(key)
        place = self._bucket_of[key]
        if self._in_mxfp8 and self._in_mxfp8[place].holds_gather:
            raise ConfigError(
                f"{member.name} got a gradient in the memory in which it is being gathered, as its module was not "
                f"called; set ddp.reuse_grad_buf_for_mxfp8_param_ag=false."
            )
        if not self._exchanges or not self.ddp_config.overlap_grad_reduce:
            return
        if place < self._next:
            raise ConfigError(
                f"{member.name} got another gradient after its sum over the ranks had begun, as a loss with several "
                f"backward passes gives; set ddp.overlap_grad_reduce=false."
            )
        self._waiting[place].discard(key)
        while self._next < len(self.buckets) and not self._waiting[self._next]:
            self._start_sum(self.buckets[self._next])
            self._next += 1

    def _start_sum(self, bucket: Bucket) -> None:
        if self.notes is not None:
            own = [one for one in bucket.members if id(one.parameter) in self._used]
            self.notes.add([one.parameter for one in own], [one.gradient for one in own])
        bucket.start_sum()

    def _divided(self) -> Iterator[Bucket]:
        """Move the trained parameters into flat tensors, one for each type and device; their parts are the buckets."""
        kind: Callable[..., Bucket] = partial(Bucket, summands=_summands(self.module))
        if self.ddp_config.fp8_param_gather:
            kind = partial(MXFP8Bucket, shares=self.ddp_config.reuse_grad_buf_for_mxfp8_param_ag)
        named = [(name, one) for name, one in self.module.named_parameters() if one.requires_grad][::-1]
        for name, one in named:
            if self.ddp_config.fp8_param_gather and one.dtype in _LOW_PRECISION:
                raise ConfigError(
                    f"ddp.fp8_param_gather=true keeps float32 masters of float32 weights, and {name} is "
                    f"{str(one.dtype).removeprefix('torch.')}; load the model in float32, or set it to false."
                )
            if not one.ndim:
                raise ConfigError(
                    f"{name} has no dimension, so its update cannot be divided between ranks; make it a vector of one "
                    f"element, or set ddp.use_distributed_optimizer=false."
                )
        named.sort(key=lambda pair: (str(pair[1].dtype), str(pair[1].device)))
        for (dtype, device), group in groupby(named, key=lambda pair: (pair[1].dtype, pair[1].device)):
            members, size = list(group), self.ranks.size
            values = torch.zeros(sum(room(one, size) for _, one in members), dtype=dtype, device=device)
            gradients = torch.zeros_like(values)
            self._gradients.append(gradients)
            start = 0
            for part in _parts(members, int(self.ddp_config.bucket_cap_mb * 2**20) // dtype.itemsize):
                end = start + sum(room(one, size) for _, one in part)
                summed_in = _summed_in(dtype, self.ddp_config)
                yield kind(part, values[start:end], gradients[start:end], self.ranks, summed_in)
                start = end

    def _used_anywhere(self) -> set[int]:
        """The ids of parameters with a gradient on any rank, or of all. Collective if it looks for others."""
        trained = [one for one in self.members if one.parameter.requires_grad]
        if self.ddp_config.find_unused_parameters:
            flags = torch.tensor([float(id(one.parameter) in self._used) for one in trained])
            flags = flags.to(self._gradients[0].device)
            for group in (self.ranks.shards, self.ranks.replicas):
                if group is not None:
                    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
            return {id(one.parameter) for one, flag in zip(trained, flags.tolist(), strict=True) if flag}
        unused = [one.name for one in trained if id(one.parameter) not in self._used]
        if unused:
            raise ConfigError(
                f"{listed(unused, _NAMES_SHOWN)} got no gradient in this step, but ranks that divide the updates sum "
                f"those of all parameters; freeze what the loss does not use, or set ddp.find_unused_parameters=true."
            )
        return {id(one.parameter) for one in trained}

    def _has_views(self) -> bool:
        return all(one.parameter.grad is one.first_grad for one in self.members)


class _Arrival:
    """Called with a parameter when a backward pass has added to its gradient."""

    def __init__(self, chunk: BufferedDataParallel, member: Member) -> None:
        self._chunk, self._member = chunk, member

    def __call__(self, parameter: Tensor) -> None:
        self._member.take_from_parameter()
        self._chunk.arrived(self._member)


def buffered_data_parallel(
    chunks: list[nn.Module], world: World, config: DistributedDataParallelConfig
) -> list[nn.Module]:
    """Wrap the chunks so that the ranks divide the updates of an optimizer.

    Collective: weights and buffers are broadcast from the first rank.

    Args:
        chunks: the model chunks; one unless the model is split into several.
        world: the ranks of the run.
        config: the section `ddp`.

    Raises:
        ConfigError: for models that differ between the ranks, or a parameter without dimensions.
        ShardingError: for a parameter that is sharded over ranks.
    """
    from onstep.distributed.fully_sharded import broadcast, check_alike  # importing DTensor costs 0.7 s

    check_undivided(chunks, "whole on every rank", along=world.part_of_mesh("tp") if world.sizes.tp > 1 else None)
    shards, instances = world.sizes.dp_shard, config.num_distributed_optimizer_instances
    if shards == 1 and 1 < instances < world.data.size:
        raise ConfigError(
            f"ddp.num_distributed_optimizer_instances={instances} requires a world with {instances} replicas, and this "
            f"one has {world.sizes.dp_replicate}; open it by open_world(cfg.dist, cfg.parallel_sizes(<ranks>))."
        )
    axis = "dp_replicate" if shards == 1 else "dp_shard"
    axes = ("dp_replicate", "dp_shard") if shards > 1 and world.sizes.dp_replicate > 1 else (axis,)
    is_queued = config.overlap_param_gather and world.device.type == "cpu"
    ranks = Ranks(
        world.part_of_mesh(*axes),
        lambda tensors: world.beside_tensors(tensors, *axes),
        world.group_beside(axis) if is_queued else None,
    )
    for chunk in chunks:
        check_alike(chunk, world)
        broadcast(chunk, world)
    return [_wrapper(chunk, ranks, config) for chunk in chunks]


def _wrapper(chunk: nn.Module, ranks: Ranks, config: DistributedDataParallelConfig) -> BufferedDataParallel:
    """That of an earlier training, whose shards an optimizer may have, if nothing has changed; else a new one."""
    known = kept() if (kept := _WRAPPERS.get(chunk)) is not None else None
    if known is not None:
        trained = {id(one) for one in chunk.parameters() if one.requires_grad}
        is_same = trained == {id(one.parameter) for one in known.members}
        if is_same and (known.ranks, known.ddp_config) == (ranks, config):
            known.join(ranks)
            known.zero_grad_buffer()
            return known
        known.release()
    made = BufferedDataParallel(chunk, ranks, config)
    _WRAPPERS[chunk] = ref(made)
    return made


def buffered_wrappers(parameters: Iterable[Tensor]) -> list[BufferedDataParallel]:
    """The wrappers that update any of these parameters.

    Args:
        parameters: of models, wrapped or not.
    """
    known = {id(one) for one in parameters}
    made = [wrapper for kept in _WRAPPERS.values() if (wrapper := kept()) is not None]
    return [one for one in made if any(id(member.parameter) in known for member in one.members)]


def buffered_chunks(chunks: Sequence[nn.Module]) -> list[BufferedDataParallel]:
    """Those of the chunks whose updates are divided between ranks.

    Args:
        chunks: the model chunks.
    """
    return [chunk for chunk in chunks if isinstance(chunk, BufferedDataParallel)]


def _parts(named: Sequence[tuple[str, nn.Parameter]], elements: int) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """Parameters of at least that many elements together, in order; the last part may have fewer.

    A parameter that has as many is a part by itself, since its rows can be sent without a copy; the small ones before
    and after it share another.
    """
    part: list[tuple[str, nn.Parameter]] = []
    for name, one in named:
        if held_part(one).numel() >= elements:
            yield [(name, one)]
            continue
        part.append((name, one))
        if sum(held_part(parameter).numel() for _, parameter in part) >= elements:
            yield part
            part = []
    if part:
        yield part


def _summands(module: nn.Module) -> Set[int]:
    """The ids of the DTensors of whose gradients tensor-parallel ranks have summands."""
    if not is_sharded(module.parameters()):
        return frozenset()
    from onstep.distributed.tensor_parallel import summed_parameters  # importing DTensor costs 0.7 s

    return summed_parameters(module)


def _summed_in(dtype: torch.dtype, config: DistributedDataParallelConfig) -> torch.dtype | None:
    if config.grad_reduce_in_bf16:
        return torch.bfloat16
    return torch.float32 if config.grad_reduce_in_fp32 and dtype in _LOW_PRECISION else None
