"""Stateful adapters that every run saves: the weights of a model, wrapped or chunked, and the random generators."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from onstep.config.suggestions import listed
from onstep.distributed.buffered import BufferedDataParallel, buffered_chunks
from onstep.distributed.pipeline.seats import is_staged
from onstep.distributed.shards import is_sharded, put_into_shards
from onstep.errors import CheckpointError

NAMES_SHOWN = 5
"""How many names of each kind an error lists; the remaining ones are counted."""
_REMEDY = (
    "Build the model that the checkpoint was saved from; if the configuration builds it, with the section `model` (or "
    "the tokenizer) of `config` in the checkpoint's manifest.json. Or load a matching checkpoint "
    "(checkpoint.load=PATH, resume_from_checkpoint), or start a new run (run.fresh=true, "
    "resume_from_checkpoint=False)."
)


class ModelState:
    """Parameters and persistent buffers of a model's chunks, under the names of the unwrapped modules.

    A single chunk keeps its names, and so do stages of a pipeline, whose names are those of the whole model; with
    several others, those of chunk i get the prefix `chunk_<i>.`. Wrappers (data
    parallelism, `torch.compile`) do not show up in the names, so a checkpoint loads with or without them.

    Of parameters in MXFP8 it has the float32 masters, each rank those of its rows.

    Args:
        chunks: the model chunks; one unless the model is split into several.
    """

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self._modules = [_bare_module(chunk) for chunk in chunks]
        self._with_masters = [chunk for chunk in buffered_chunks(chunks) if chunk.masters]
        put_into_shards(self._modules)

    @property
    def is_sharded(self) -> bool:
        """Whether ranks hold parts of the model."""
        return bool(self._with_masters) or any(
            is_sharded((*module.parameters(), *module.buffers())) for module in self._modules
        )

    def state_dict(self) -> dict[str, Any]:
        """The tensors themselves, not copies; tied tensors share their storage."""
        state = self._own_tensors()
        masters: dict[int, nn.Parameter] = {}
        for chunk in self._with_masters:
            chunk.take_written()
            masters |= chunk.masters
        for name, parameter in self.named_parameters() if masters else ():
            if name in state and id(parameter) in masters:
                state[name] = masters[id(parameter)].detach()
        return state

    def destinations(self, outline: dict[str, Any]) -> dict[str, Any]:
        """The model's own tensors, into which a state in shards is read: see `Stateful`.

        Args:
            outline: the stored state, with tensors on the meta device.

        Raises:
            CheckpointError: listing what is missing, unexpected, or differs in shape or dtype.
        """
        own = self._own_tensors()
        if self._fits(own, outline):
            return {name: own[name] if isinstance(value, Tensor) else value for name, value in outline.items()}
        return outline

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy the values into the model's existing tensors; nothing is copied unless everything matches.

        A module that has its own way of loading, such as one that renames older weights, is given what does not match,
        and decides itself.

        Args:
            state_dict: what `state_dict()` returned.

        Raises:
            CheckpointError: listing what is missing, unexpected, or differs in shape or dtype.
        """
        self._fits(self._own_tensors(), state_dict)
        for prefix, module in self._prefixed():
            own = {name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)}
            if len(self._modules) > 1 and not prefix:
                own = {name: own[name] for name in module.state_dict()}
            try:
                module.load_state_dict(own)
            except RuntimeError as error:
                reason = " ".join(str(error).split()).rstrip(". ")
                raise CheckpointError(
                    f"{type(module).__name__} cannot load the weights: {reason}. {_REMEDY}"
                ) from error
        for chunk in self._with_masters:
            chunk.take_values()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters, with a tied one under each of its names."""
        for prefix, module in self._prefixed():
            yield from module.named_parameters(prefix.removesuffix("."), remove_duplicate=False)

    def _own_tensors(self) -> dict[str, Any]:
        """What the forward pass reads."""
        state: dict[str, Any] = {}
        for prefix, module in self._prefixed():
            state |= module.state_dict(prefix=prefix)
        return state

    def _fits(self, own: dict[str, Any], given: dict[str, Any]) -> bool:
        """Whether the tensors match; False only for modules that have their own way of loading."""
        problems = mismatches(own, given)
        if problems and not all(_loads_its_own_way(module) for module in self._modules):
            raise CheckpointError("The weights do not match this model: " + "; ".join(problems) + ". " + _REMEDY)
        return not problems

    def _prefixed(self) -> list[tuple[str, nn.Module]]:
        if len(self._modules) == 1 or is_staged(self._modules):
            return [("", module) for module in self._modules]
        return [(f"chunk_{i}.", module) for i, module in enumerate(self._modules)]


def _bare_module(module: nn.Module) -> nn.Module:
    """The module inside torch's data-parallel and compile wrappers, which have no tensors of their own.

    Any other wrapper, such as Megatron's, is part of the model: its own tensors are saved, and its keys begin with the
    name that it has for the inner module.
    """
    while True:  # torch.compile's wrapper is recognized by its attribute, which avoids importing it
        is_wrapper = isinstance(module, DistributedDataParallel | BufferedDataParallel)
        inner: Any = module.module if is_wrapper else module._modules.get("_orig_mod")
        if inner is None:
            return module
        module = inner


def _loads_its_own_way(module: nn.Module) -> bool:
    """Whether a module, or one inside it, overrides how torch loads weights, or has a hook for it."""
    own = type(module).load_state_dict is not nn.Module.load_state_dict or "load_state_dict" in vars(module)
    return own or any(
        not type(one)._load_from_state_dict.__module__.startswith("torch.")
        or any(not _renames_nothing(hook) for hook in one._load_state_dict_pre_hooks.values())
        for one in module.modules()
    )


def _renames_nothing(hook: Any) -> bool:
    """Whether a hook is one of `fully_shard` or of divided updates, which rename nothing."""
    known = ("torch.distributed.fsdp.", "onstep.distributed.")
    return str(getattr(getattr(hook, "hook", hook), "__module__", "")).startswith(known)


def mismatches(own: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """The reasons why `given` cannot be loaded into `own`, one phrase per kind; empty if it can be loaded."""
    differences = [_difference(name, own[name], given[name]) for name in own if name in given]
    found = {
        "missing": [name for name in own if name not in given],
        "unexpected": [name for name in given if name not in own],
        "different": [difference for difference in differences if difference],
    }
    return [f"{kind} {listed(names, NAMES_SHOWN)}" for kind, names in found.items() if names]


def _difference(name: str, own: Any, given: Any) -> str:
    if not isinstance(own, Tensor):  # a module's extra state: left to the module to check
        return ""
    if not isinstance(given, Tensor):
        return f"{name} (a tensor here, {type(given).__name__} in the checkpoint)"
    if own.shape != given.shape:
        return f"{name} (shape {tuple(own.shape)} here, {tuple(given.shape)} in the checkpoint)"
    if own.dtype != given.dtype:
        return f"{name} (dtype {own.dtype} here, {given.dtype} in the checkpoint)"
    return ""


_log = logging.getLogger(__name__)

_MALFORMED = (KeyError, TypeError, ValueError, OverflowError, AttributeError, RuntimeError)
"""What the generators raise for an invalid state."""


class RngState:
    """Stateful over Python's `random`, NumPy's global generator, torch's CPU generator and this rank's device's.

    Each rank has its own generators, so the component is PER_RANK.

    Args:
        device: the device whose generator is saved beside those of the CPU.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        """`device` is the one whose generator is saved; for the CPU, torch's CPU generator is all there is."""
        self._device = torch.device(device)

    def state_dict(self) -> dict[str, Any]:
        """The exact state of each generator, including a cached second Gaussian draw."""
        return {
            "python": random.getstate(),
            "numpy": np.random.get_state(legacy=False),
            "torch": torch.get_rng_state(),
            "device": {"type": self._device.type, "state": self._device_state()},
        }

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restore the generators on exit, also after an error: what is drawn within the block leaves no trace."""
        before = self.state_dict()
        try:
            yield
        finally:
            self.load_state_dict(before)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore every generator; on an error, none is changed.

        A state saved on a different device type leaves this device's generator unchanged, with a warning.

        Args:
            state_dict: what `state_dict()` returned.

        Raises:
            CheckpointError: for a state that a generator does not accept.
        """
        try:
            python, numpy, cpu, device = (state_dict[key] for key in ("python", "numpy", "torch", "device"))
            is_same_device = device["type"] == self._device.type
            self._try_out(python, numpy, cpu, device["state"] if is_same_device else None)
        except _MALFORMED as error:
            raise CheckpointError(f"the state of the random generators cannot be loaded: {error!r}.") from error
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu.cpu())
        if is_same_device and device["state"] is not None:
            own = () if self._device.type == "mps" else (self._device,)
            torch.get_device_module(self._device).set_rng_state(device["state"].cpu(), *own)
        elif not is_same_device:
            _log.warning(
                "The random state was saved on device type %s, but this rank runs on %s: the device's generator is "
                "not restored, so its draws differ from those of an uninterrupted run.",
                device["type"],
                self._device.type,
            )

    def _try_out(self, python: Any, numpy: Any, cpu: Tensor, device: Tensor | None) -> None:
        """Load the states into scratch generators, which validate them; the global ones are not touched."""
        random.Random().setstate(python)
        bit_generator = np.random.get_bit_generator()  # type: ignore[attr-defined]  # missing in NumPy's stubs
        np.random.RandomState(type(bit_generator)()).set_state(numpy)
        torch.Generator().set_state(cpu.cpu())
        if self._device.type != "cpu":
            torch.Generator(self._device).set_state(device.cpu())  # type: ignore[union-attr]

    def _device_state(self) -> Tensor | None:
        if self._device.type == "cpu":
            return None
        own = () if self._device.type == "mps" else (self._device,)
        state: Tensor = torch.get_device_module(self._device).get_rng_state(*own)
        return state
