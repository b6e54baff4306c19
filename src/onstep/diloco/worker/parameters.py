"""Reads and writes the trained parameters of a model whose ranks may have copies or shards of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from onstep.diloco.codec.specs import specs_of
from onstep.diloco.worker.parts import Parts
from onstep.distributed.buffered import buffered_wrappers
from onstep.distributed.pipeline.elsewhere import of_all_stages, only_here
from onstep.distributed.pipeline.whole import pipeline_of
from onstep.distributed.shards import as_dtensor, held_part, put_into_shards, updated_shard
from onstep.distributed.world import World
from onstep.errors import ConfigError
from onstep.events.context import unwrap

_WRAPPED = ("_orig_mod.", "_checkpoint_wrapped_module.")


class Parameters:
    """The parameters of a model, or of its chunks, that require gradients; tied ones once. Collective in a pipeline.

    Names are those of the bare model: wrappers of data parallelism, compilation and activation checkpointing leave no
    trace, so that a worker may use them and another not. With several chunks, `<chunk>.` comes before a name that is
    not unique.

    Raises:
        ConfigError: for a model without trained parameters, or in torch's older FSDP, which hides them.
        InvalidTensorsError: for parameters that cannot be averaged.
    """

    def __init__(self, model: nn.Module | Sequence[nn.Module], world: World) -> None:
        chunks = list(model) if isinstance(model, Sequence) else [model]
        pipeline = pipeline_of(unwrap(chunks[0]))
        self._modules = chunks if pipeline is None else pipeline.chunks
        self._parameters = _named(self._modules)
        if not self._parameters:
            raise ConfigError("the model has no parameters that require gradients; unfreeze those to be trained.")
        hidden = [name for name in self._parameters if "_flat_param" in name]
        if hidden:
            raise ConfigError(
                f"{hidden[0]} is a flat parameter of FullyShardedDataParallel; use fully_shard (FSDP2), which keeps "
                f"the parameters' names."
            )
        self._buffered = buffered_wrappers(self._parameters.values())
        self._shards = {name: updated_shard(one) for name, one in self._parameters.items()}
        """What this rank may change of them: itself, or rows where ranks divide the updates."""
        if pipeline is not None:
            self._shards = of_all_stages(_as_dtensors(self._shards, pipeline.world), pipeline.world)
        self.specs = specs_of(self._parameters if pipeline is None else self._shards)
        """Of all of them, of all stages of a pipeline, in the order of their names."""
        self.parts = Parts(world, self._shards, self.specs)
        """Which part of each this rank reads and writes."""

    def dtype(self, name: str) -> torch.dtype:
        """The dtype that a parameter is trained in."""
        return self._shards[name].dtype

    @torch.no_grad()
    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Copies of this rank's parts on the CPU, in float32 or float64."""
        self._settle()
        return {name: self._part(name).to("cpu", self.parts.dtype(name), copy=True).contiguous() for name in names}

    def whole(self) -> dict[str, Tensor]:
        """On rank 0, copies of all parameters on the CPU; elsewhere nothing. Collective."""
        names, found = list(self._parameters), dict[str, Tensor]()

        def keep(name: str, whole: Tensor | None) -> None:
            assert whole is not None
            found[name] = whole

        self.parts.through_main(names, keep, self.read(names).__getitem__, returns=False)
        return found

    @torch.no_grad()
    def write(self, names: Iterable[str], value: Callable[[str], Tensor]) -> None:
        """Set parameters to new values. Collective.

        Args:
            names: of the parameters.
            value: this rank's part of one.
        """
        self._settle()
        for name in names:
            shard = self._shards[name]
            if as_dtensor(shard) is None:
                shard.copy_(self.parts.everywhere(name, value(name)))
            elif self.parts.boxes[name].numel:
                held_part(shard).copy_(value(name))
        for chunk in self._buffered:
            chunk.mark_updated()
            chunk.start_param_sync(force_sync=True)

    def _part(self, name: str) -> Tensor:
        shard, box = self._shards[name], self.parts.boxes[name]
        if as_dtensor(shard) is None:
            return box.of(shard.detach())
        return held_part(shard) if box.numel else torch.empty(box.sizes, dtype=shard.dtype)

    def _settle(self) -> None:
        """Let shards be the only copy: of FSDP2, which may have gathered some, and while updates are gathered."""
        put_into_shards(self._modules)
        for chunk in self._buffered:
            chunk.finish_param_sync()
            chunk.take_written()


def _as_dtensors(shards: dict[str, Tensor], world: World) -> dict[str, Tensor]:
    """What a rank has of its stages; whole tensors are on no other rank."""
    return {name: only_here(one, world) if as_dtensor(one) is None else one for name, one in shards.items()}


def _named(chunks: list[nn.Module]) -> dict[str, Parameter]:
    """The trained parameters by name, each once."""
    named = [_trained(unwrap(chunk)) for chunk in chunks]
    names = [name for one in named for name in one]
    repeated = {name for name in names if names.count(name) > 1} if len(named) > 1 else set()
    found: dict[str, Parameter] = {}
    seen: set[int] = set()
    for index, one in enumerate(named):
        for name, parameter in one.items():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                found[f"{index}.{name}" if name in repeated else name] = parameter
    return found


def _trained(module: nn.Module) -> dict[str, Parameter]:
    return {_bare(name): one for name, one in module.named_parameters() if one.requires_grad}


def _bare(name: str) -> str:
    for wrapper in _WRAPPED:
        name = name.replace(wrapper, "")
    return name
