"""Reads and writes the trained parameters of a model whose ranks may have copies or shards of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from onstep.diloco.codec.specs import master_dtype, specs_of
from onstep.diloco.worker.ranks import share_tensor
from onstep.distributed.shards import as_dtensor, whole
from onstep.distributed.world import World
from onstep.errors import ConfigError
from onstep.events.context import unwrap

_WRAPPED = ("_orig_mod.", "_checkpoint_wrapped_module.")


class Parameters:
    """The parameters of a model, or of its chunks, that require gradients; tied ones once.

    Names are those of the bare model: wrappers of data parallelism, compilation and activation checkpointing leave no
    trace, so that a worker may use them and another not. With several chunks, `<chunk>.` comes before a name that is
    not unique.

    Raises:
        ConfigError: for a model without trained parameters, or in torch's older FSDP, which hides them.
        InvalidTensorsError: for parameters that cannot be averaged.
    """

    def __init__(self, model: nn.Module | Sequence[nn.Module], world: World) -> None:
        self._world = world
        self._parameters = _named(list(model) if isinstance(model, Sequence) else [model])
        if not self._parameters:
            raise ConfigError("the model has no parameters that require gradients; unfreeze those to be trained.")
        hidden = [name for name in self._parameters if "_flat_param" in name]
        if hidden:
            raise ConfigError(
                f"{hidden[0]} is a flat parameter of FullyShardedDataParallel; use fully_shard (FSDP2), which keeps "
                f"the parameters' names."
            )
        self.specs = specs_of(self._parameters)
        """Of all of them, in the order of their names."""

    def dtype(self, name: str) -> torch.dtype:
        """The dtype that a parameter is trained in."""
        return self._parameters[name].dtype

    @torch.no_grad()
    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Copies of whole parameters on the CPU, in float32 or float64; empty on other ranks than 0. Collective."""
        copies: dict[str, Tensor] = {}
        for name in names:
            parameter = whole(self._parameters[name].detach())
            if self._world.is_main:
                copies[name] = parameter.to("cpu", master_dtype(parameter.dtype), copy=True).contiguous()
        return copies

    @torch.no_grad()
    def write(self, names: Iterable[str], values: Mapping[str, Tensor]) -> None:
        """Set parameters to the values of rank 0. Collective; `values` of other ranks are not read."""
        for name in names:
            parameter = self._parameters[name]
            dtype = master_dtype(parameter.dtype)
            value = share_tensor(self._world, values.get(name), tuple(parameter.shape), dtype)
            _assign(parameter, value)


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


def _assign(parameter: Parameter, value: Tensor) -> None:
    sharded = as_dtensor(parameter)
    if sharded is None:
        parameter.copy_(value)
        return
    from torch.distributed.tensor import distribute_tensor

    on_device = value.to(sharded.device_mesh.device_type, parameter.dtype)
    # every rank has the whole value, so that no rank needs to send shards
    shard = distribute_tensor(on_device, sharded.device_mesh, sharded.placements, src_data_rank=None)
    sharded.to_local().copy_(shard.to_local())
