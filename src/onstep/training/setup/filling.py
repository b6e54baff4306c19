"""Gives the parameters of a model their values once it is divided between ranks: by name, one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from onstep.distributed.boxes import box_of
from onstep.distributed.shards import local_part
from onstep.errors import ConfigError, OnstepError
from onstep.models.weight_values import GiveAll, Slices, Value

_SHOWN = 5


class PendingWeights:
    """Where the values of a model come from whose parameters are on the device `meta`.

    The model may be changed until `Filling` is made: what is named here is found again as the same object.

    Args:
        model: the model as it was built; its buffers have values.
        give_all: gives the values under the names that the model has now, in the types that they are read in.
    """

    def __init__(self, model: nn.Module, give_all: GiveAll) -> None:
        self.give_all = give_all
        self.built: dict[str, Tensor] = dict(_named_tensors(model))
        """The parameters and buffers by name; a shared one under each of its names."""
        self.types = {name: one.dtype for name, one in self.built.items() if isinstance(one, nn.Parameter)}
        """The type of each parameter: values are rounded to it before they are converted to any later one."""


class Filling:
    """The parameters of a model that is about to be divided between ranks, and what they are to be filled with.

    Args:
        chunks: the model, or the stages of it that this rank has, before they are divided.
        weights: where its values come from.
    """

    def __init__(self, chunks: Sequence[nn.Module], weights: PendingWeights) -> None:
        self._weights, self._chunk = weights, chunks[0] if len(chunks) == 1 else nn.ModuleList(chunks)
        names: dict[int, list[str]] = {}
        for name, tensor in _named_tensors(self._chunk):
            names.setdefault(id(tensor), []).append(name)
        self._ties = [group for group in names.values() if len(group) > 1]
        self._names = {name: names[id(one)][0] for name, one in weights.built.items() if id(one) in names}
        self._dropped = {name for name, one in weights.built.items() if id(one) not in names}
        self._lacking = {names[id(one)][0] for _, one in _named_tensors(self._chunk) if one.is_meta}

    @torch.no_grad()
    def fill(self, device: torch.device) -> None:
        """Give the model, divided in place, memory on a device, and each rank its part of each value. Collective.

        Args:
            device: where its shards are.

        Raises:
            ConfigError: for a parameter without a value, or one that is no longer shared as it was.
            OnstepError: for values of another shape, or of no parameter.
        """
        chunk = self._chunk
        self._check_shared(chunk, "was divided: set fsdp.wrap to a class that contains both")
        chunk._apply(lambda one: torch.empty_like(one, device=device) if one.is_meta else one)  # type: ignore[no-untyped-call]
        self._tie(chunk)
        targets, filled = dict(_named_tensors(chunk)), set[str]()

        def put(name: str, value: Value) -> None:
            if name in self._dropped:
                return
            if name not in self._names:
                raise OnstepError(f"there is a value for {name}, which the model does not have; check its sizes.")
            target = targets[self._names[name]]
            if tuple(target.shape) != value.shape:
                raise OnstepError(
                    f"the value of {name} has the shape {value.shape}, but the model's has {tuple(target.shape)}; use "
                    f"the configuration that the weights were saved with."
                )
            own = _local(target)
            if own is not None:
                read = value.read(own[1])
                own[0].copy_(read.to(self._weights.types.get(name, read.dtype)))
            filled.add(self._names[name])

        self._weights.give_all(put)
        lacking = sorted(self._lacking - filled) + [name for name, one in targets.items() if one.is_meta]
        if lacking:
            more = f" and {len(lacking) - _SHOWN} more" if len(lacking) > _SHOWN else ""
            raise ConfigError(
                f"{', '.join(lacking[:_SHOWN])}{more} got no value: nothing has initialized or loaded it; initialize "
                f"it in the model's own way, or load weights that have it."
            )
        self._check_shared(chunk, "was filled")

    def _tie(self, chunk: nn.Module) -> None:
        for group in self._ties:
            shared = _get(chunk, group[0])
            for name in group[1:]:
                module, _, own = name.rpartition(".")
                registered = chunk.get_submodule(module)
                kind = registered._parameters if own in registered._parameters else registered._buffers
                kind[own] = shared  # type: ignore[assignment]

    def _check_shared(self, chunk: nn.Module, when: str) -> None:
        for group in self._ties:
            for name in group[1:]:
                if _get(chunk, name) is not _get(chunk, group[0]):
                    raise ConfigError(f"{group[0]} and {name} are one parameter, but not once the model {when}.")


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _get(chunk: nn.Module, name: str) -> Tensor:
    module, _, own = name.rpartition(".")
    found: Tensor = getattr(chunk.get_submodule(module), own)
    return found


def _local(tensor: Tensor) -> tuple[Tensor, Slices] | None:
    """What this rank has of a tensor, and where that lies in the whole one; None if it has nothing of it."""
    box = box_of(tensor)
    if box is None or not box.numel:
        return None
    part = tuple(slice(start, start + size) for start, size in zip(*box, strict=True))
    return local_part(tensor), part
