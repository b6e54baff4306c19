"""Divides the tensors of a model's modules between ranks, each of which computes its part of their results.

Parameters become DTensors on the ranks of `tp`: divided ones by a dimension, others replicated, so that optimizers,
norms and checkpoints see one kind. A module computes with plain tensors, those that this rank holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn.functional import dropout, embedding

from onstep.distributed.gathered_inputs import product, with_part
from onstep.distributed.shards import as_dtensor
from onstep.distributed.tensor_regions import check_divisible, copied, gathered, joined, own_part, scattered, summed
from onstep.distributed.world import World
from onstep.errors import ConfigError

Move = Callable[[Tensor], Tensor]
"""Moves an activation between ranks."""
SEQUENCE = 1
"""The dimension of positions in an activation, (batch, seq, hidden)."""


@dataclass(frozen=True)
class TensorRanks:
    """The ranks that divide the tensors of each layer, and how they move activations between them.

    With sequence parallelism, activations between the divided modules are parts of the sequence wherever gradients are
    recorded; without gradients, as in generation, they are whole on each rank.
    """

    mesh: DeviceMesh
    """The mesh of these ranks, of one dimension."""
    divides_sequences: bool

    @property
    def group(self) -> ProcessGroup:
        """The process group of the ranks."""
        return self.mesh.get_group()

    @property
    def rank(self) -> int:
        """The place of this rank among them."""
        return int(self.mesh.get_local_rank())

    @property
    def size(self) -> int:
        """Their number."""
        return self.mesh.size()

    @property
    def are_sequences_divided(self) -> bool:
        """Whether activations between divided modules are parts of the sequence now."""
        return self.divides_sequences and torch.is_grad_enabled()

    def enter(self, x: Tensor) -> Tensor:
        """The whole input of modules whose outputs are divided by columns. Collective.

        Args:
            x: (batch, seq, hidden), or this rank's positions of it.
        """
        if not self.are_sequences_divided:
            return copied(x, self.group)
        return with_part(gathered(x, SEQUENCE, self.group), x, self._gathered_again)

    def leave(self, x: Tensor) -> Tensor:
        """The sum of what the ranks have computed, or this rank's positions of it. Collective.

        Args:
            x: this rank's summand of a result, (batch, seq, hidden).
        """
        if not self.are_sequences_divided:
            return summed(x, self.group)
        return scattered(self.divisible(x), SEQUENCE, self.group)

    def sum(self, x: Tensor) -> Tensor:
        """The sum of what the ranks have computed. Collective.

        Args:
            x: this rank's summand.
        """
        return summed(x, self.group)

    def divided(self, x: Tensor) -> Tensor:
        """This rank's positions of what is the same on all ranks, if sequences are divided.

        Args:
            x: (batch, seq, hidden).
        """
        return own_part(self.divisible(x), SEQUENCE, self.group) if self.are_sequences_divided else x

    def whole(self, x: Tensor) -> Tensor:
        """All positions, for a computation that each rank does as a whole. Collective if sequences are divided.

        Args:
            x: (batch, seq, hidden), or this rank's positions of it.
        """
        if not self.are_sequences_divided:
            return x
        return with_part(joined(x, SEQUENCE, self.group), x, self._gathered_again)

    def _gathered_again(self, part: Tensor) -> Tensor:
        return joined(part, SEQUENCE, self.group)

    def divisible(self, x: Tensor) -> Tensor:
        """The same, unless its positions cannot be divided between the ranks.

        Args:
            x: (batch, seq, hidden).

        Raises:
            ConfigError: if the number of ranks does not divide that of the positions.
        """
        check_divisible(x.shape[SEQUENCE], self.size)
        return x


@dataclass(frozen=True)
class Part:
    """What a rank computes of a module."""

    dims: Mapping[str, int] = field(default_factory=dict)
    """The dimension by which each parameter is divided; others are replicated."""
    blocks: int | None = None
    """The number of parts of a divided parameter, each of which neighboring ranks have, whose gradients are summands;
    None for one on each rank."""
    once: tuple[str, ...] = ()
    """Replicated parameters that the first rank adds to results that are summed later; they are 0 on the others."""
    sums_gradients: bool = False
    """Whether the ranks compute summands of the gradients of replicated parameters."""
    before: Move | None = None
    """What is done with the first argument."""
    after: Move | None = None
    """What is done with the result."""
    adds_bias_last: bool = False
    """Whether the bias is added to what `after` returns: where it sums, once."""
    forward: Callable[..., Any] | None = None
    """Called with the module and its arguments, instead of its class's `forward`."""

    def sums(self, name: str) -> bool:
        """Whether the ranks compute summands of the gradient of a parameter.

        Args:
            name: of the parameter in its module.
        """
        return self.blocks is not None if name in self.dims else self.sums_gradients or name in self.once


class LocalForward:
    """The `forward` of a module that computes with the parts of its parameters that this rank holds.

    Args:
        module: the module.
        part: what this rank computes of it.
    """

    def __init__(self, module: nn.Module, part: Part) -> None:
        self.module, self.part = module, part
        multiplies = type(module).forward is nn.Linear.forward
        forward: Callable[..., Any] = part.forward or (_multiplied if multiplies else type(module).forward)
        self._forward: Callable[..., Any] = partial(forward, module)
        if part.forward is None and "forward" in vars(module):
            self._forward = vars(module)["forward"]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's result."""
        module, part = self.module, self.part
        if part.before is not None:
            if args:
                args = (part.before(args[0]), *args[1:])
            else:
                first = next(iter(kwargs))
                kwargs[first] = part.before(kwargs[first])
        kept = dict(module._parameters)
        own: dict[str, Any] = {name: self._local(name, one) for name, one in kept.items()}
        bias = own["bias"] if part.adds_bias_last else None
        if part.adds_bias_last:
            own["bias"] = None
        module._parameters.update(own)
        try:
            result = self._forward(*args, **kwargs)
        finally:
            module._parameters.update(kept)
        result = result if part.after is None else part.after(result)
        return result if bias is None else result + bias.to(result.dtype)

    def _local(self, name: str, parameter: Tensor | None) -> Tensor | None:
        dtensor = None if parameter is None else as_dtensor(parameter)
        if dtensor is None:
            return parameter
        placements = [*dtensor.placements[:-1], Partial()] if self.part.sums(name) else None
        local = dtensor.to_local(grad_placements=placements)
        return local * 0.0 if name in self.part.once and dtensor.device_mesh.get_local_rank() else local


def _multiplied(module: nn.Linear, x: Tensor) -> Tensor:
    return product(x, module.weight, module.bias)


def divide(chunk: nn.Module, plan: Mapping[str, Part], ranks: TensorRanks, world: World) -> None:
    """Divide a model between the ranks of `tp`, in place. Collective unless its weights are on `meta`.

    The weights become those of the first rank that has the same, on its device. A module that another chunk of this
    rank has too is divided with that.

    Args:
        chunk: the whole model, or a stage of it.
        plan: what a rank computes of each module, by name; each module with parameters of its own must be in it.
        ranks: the ranks that divide it.
        world: the ranks of the run.

    Raises:
        ConfigError: for a module with parameters that the plan lacks, a parameter that is already divided, one that
            two modules share and divide differently, or one whose gradient Megatron would average.
    """
    _check(chunk, plan)
    made: dict[int, tuple[nn.Parameter, list[Placement], str]] = {}
    for name, module in list(chunk.named_modules()):
        part = None if _is_divided(module) else plan.get(name)
        for own, parameter in list(module._parameters.items()):
            if parameter is None or part is None:
                continue
            mesh, placements = _layout_of(own, part, ranks, world)
            full = f"{name}.{own}" if name else own
            _check_average(parameter, full, placements, summed=part.sums(own))
            if id(parameter) not in made:
                made[id(parameter)] = _divided(parameter, mesh, placements, world), placements, full
                made[id(made[id(parameter)][0])] = made[id(parameter)]
            known, others, first = made[id(parameter)]
            if others != placements:
                raise ConfigError(
                    f"{first} and {full} are one parameter, but the plan divides it as {others[0]} and "
                    f"{placements[0]}; divide both alike, or give each a parameter of its own."
                )
            module._parameters[own] = known
        if part is not None:
            object.__setattr__(module, "forward", LocalForward(module, part))


def summed_parameters(chunk: nn.Module) -> set[int]:
    """The ids of the parameters of whose gradients the ranks of `tp` compute summands.

    Args:
        chunk: a model that `divide` was given.
    """
    parts = [(module, vars(module).get("forward")) for module in chunk.modules()]
    return {
        id(parameter)
        for module, forward in parts
        if isinstance(forward, LocalForward)
        for name, parameter in module._parameters.items()
        if parameter is not None and forward.part.sums(name)
    }


def dimension_beside(shards: int, parameter: nn.Parameter) -> Shard | None:
    """The dimension by which FSDP2 divides a parameter that the ranks of `tp` have divided: another one if it can.

    Args:
        shards: the number of ranks of FSDP2.
        parameter: the parameter; None is returned for one that is divided by its first dimension as any other is.

    Raises:
        ConfigError: if the number of shards divides no dimension.
    """
    dtensor = as_dtensor(parameter)
    divided = [one.dim for one in dtensor.placements if isinstance(one, Shard)] if dtensor is not None else []
    if dtensor is None or 0 not in divided:
        return None
    for dim in range(1, dtensor.dim()):
        if dim not in divided and dtensor.shape[dim] % shards == 0:
            return Shard(dim)
    ranks = dtensor.device_mesh.size(dtensor.placements.index(Shard(0)))
    if dtensor.shape[0] % (ranks * shards) == 0:
        return None
    raise ConfigError(
        f"a parameter of {tuple(dtensor.shape)}, which {ranks} tensor-parallel ranks divide, cannot be divided between "
        f"{shards} ranks of parallel.data_parallel_shard_size; choose sizes that are multiples of {ranks * shards}."
    )


def _is_divided(module: nn.Module) -> bool:
    return isinstance(vars(module).get("forward"), LocalForward)


def _check(chunk: nn.Module, plan: Mapping[str, Part]) -> None:
    for name, module in ((name, one) for name, one in chunk.named_modules() if not _is_divided(one)):
        for own, parameter in module._parameters.items():
            if parameter is None:
                continue
            if as_dtensor(parameter) is not None:
                raise ConfigError(
                    f"{name}.{own} is sharded already, over {as_dtensor(parameter).device_mesh}; pass a whole model."  # type: ignore[union-attr]
                )
            if name not in plan:
                raise ConfigError(
                    f"parallel.tensor_model_parallel_size > 1 requires to know how {name or 'the model'} "
                    f"({type(module).__name__}), which has the parameter {own}, is divided; remove the module, or set "
                    f"the size to 1."
                )


def _check_average(parameter: nn.Parameter, name: str, placements: list[Placement], *, summed: bool) -> None:
    """Refuse Megatron's flag where an average would not be the gradient of one process; of equal ones it is."""
    if getattr(parameter, "average_gradients_across_tp_domain", False) and (summed or placements != [Replicate()]):
        each = "summands of its gradient, which are added up" if summed else "the gradient of a part of it"
        raise ConfigError(
            f"{name}.average_gradients_across_tp_domain is true, but each tensor-parallel rank has {each}: their "
            f"average would not be the gradient of one process; remove the attribute."
        )


def _layout_of(name: str, part: Part, ranks: TensorRanks, world: World) -> tuple[DeviceMesh, list[Placement]]:
    """The mesh of a parameter, and how it is divided along each of its dimensions."""
    if name not in part.dims:
        return ranks.mesh, [Replicate()]
    if part.blocks is None:
        return ranks.mesh, [Shard(part.dims[name])]
    return world.tensor_blocks(part.blocks), [Shard(part.dims[name]), Replicate()]


@torch.no_grad()
def _divided(parameter: nn.Parameter, mesh: DeviceMesh, placements: list[Placement], world: World) -> nn.Parameter:
    """A parameter as a DTensor, of which the first dimension of a mesh may divide one."""
    shape, stride = parameter.shape, torch.empty(parameter.shape, device="meta").stride()
    value = parameter.detach()
    if not value.is_meta:
        value = value.to(world.device).contiguous()
        if value.data_ptr() == parameter.data_ptr():
            value = value.clone()
        dist.broadcast(value, group=world.group("dp_replicate", "dp_shard", "cp", "tp"), group_src=0)
    if isinstance(placement := placements[0], Shard):
        size = -(-shape[placement.dim] // mesh.size(0))
        start = min(size * mesh.get_local_rank(0), shape[placement.dim])
        value = value.narrow(placement.dim, start, min(size, shape[placement.dim] - start)).clone()
    made = DTensor.from_local(value, mesh, placements, run_check=False, shape=shape, stride=stride)
    divided = nn.Parameter(made, parameter.requires_grad)
    vars(divided).update(vars(parameter))
    return divided


def column(blocks: int | None = None) -> Part:
    """A linear layer of which each rank computes some of the outputs, from the whole input.

    Args:
        blocks: the number of parts of its outputs, if there are fewer than ranks.
    """
    return Part({"weight": 0, "bias": 0}, blocks)


def row(ranks: TensorRanks, *, has_bias: bool) -> Part:
    """A linear layer of which each rank has some of the inputs, and computes a summand of the output.

    Args:
        ranks: the ranks, which leave the region.
        has_bias: whether it has a bias.
    """
    return Part({"weight": 1}, sums_gradients=ranks.divides_sequences, after=ranks.leave, adds_bias_last=has_bias)


def vocabulary_embedding(ranks: TensorRanks, leave: Move) -> Part:
    """An embedding of which each rank has the rows of some tokens.

    Args:
        ranks: the ranks.
        leave: makes the embeddings of summands that are 0 but on one rank.
    """

    def forward(module: nn.Embedding, tokens: Tensor) -> Tensor:
        weight, start = module.weight, -(-module.num_embeddings // ranks.size) * ranks.rank
        own = tokens - start
        is_other = (own < 0) | (own >= weight.shape[0])
        padding = None if module.padding_idx is None else module.padding_idx - start
        has_padding = padding is not None and 0 <= padding < weight.shape[0]
        x = embedding(own.masked_fill(is_other, 0), weight, padding if has_padding else None)
        return x.masked_fill(is_other.unsqueeze(-1), 0.0)

    return Part({"weight": 0}, after=leave, forward=forward)


def dropout_part(ranks: TensorRanks, dim: int, is_divided: Callable[[], bool]) -> Part:
    """Dropout whose mask is this rank's part of that of one process: all ranks draw the whole one from one stream.

    Args:
        ranks: the ranks.
        dim: the dimension by which its input is divided.
        is_divided: whether it is divided now.
    """

    def forward(module: nn.Dropout, x: Tensor) -> Tensor:
        if not module.training or module.p == 0.0 or not is_divided():
            return dropout(x, module.p, module.training)
        shape = list(x.shape)
        shape[dim] *= ranks.size
        drawn = dropout(x.new_ones(shape), module.p, True).narrow(dim, ranks.rank * x.shape[dim], x.shape[dim])
        return x.masked_fill(drawn.eq(0.0), 0.0) / (1.0 - module.p or 1.0)  # keeps a byte for each value

    return Part(forward=forward)
