"""The weights of a model as one state, whatever wraps or splits the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from onstep.config.part import listed
from onstep.errors import CheckpointError

NAMES_SHOWN = 5
"""Names of each kind that an error lists; the rest is counted."""
_REMEDY = (
    "Build the model that the checkpoint was saved from: for a model of the configuration, set model.vocab_size, "
    "model.hidden_size, model.num_layers and the other sizes (or the tokenizer) to those in `config` of the "
    "checkpoint's manifest.json. Or load a checkpoint that fits (checkpoint.load=PATH), or start a new run "
    "(run.fresh=true)."
)


class ModelState:
    """Parameters and persistent buffers of the chunks of a model, by the names of the bare modules.

    One chunk keeps its names; of several, chunk i gets the prefix `chunk_<i>.`. Wrappers (data parallelism,
    `torch.compile`) leave no trace in the names, so that a checkpoint loads with and without them.
    """

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self._modules = [bare_module(chunk) for chunk in chunks]

    def state_dict(self) -> dict[str, Any]:
        """The tensors themselves, not copies: tied ones share their storage."""
        state: dict[str, Any] = {}
        for prefix, module in self._prefixed():
            state |= module.state_dict(prefix=prefix)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy the values into the model's own tensors; nothing is copied unless everything fits.

        Raises:
            CheckpointError: listing what is missing, unexpected, or of another shape or dtype.
        """
        problems = mismatches(self.state_dict(), state_dict)
        if problems:
            raise CheckpointError("The weights do not fit this model: " + "; ".join(problems) + ". " + _REMEDY)
        for prefix, module in self._prefixed():
            own = {name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)}
            module.load_state_dict(own)

    def _prefixed(self) -> list[tuple[str, nn.Module]]:
        if len(self._modules) == 1:
            return [("", self._modules[0])]
        return [(f"chunk_{i}.", module) for i, module in enumerate(self._modules)]


def bare_module(module: nn.Module) -> nn.Module:
    """The module inside data-parallel and compile wrappers."""
    while True:
        if isinstance(module, DistributedDataParallel):
            module = module.module
        elif (
            compiled := module._modules.get("_orig_mod")
        ) is not None:  # torch.compile's wrapper, without importing it
            module = compiled
        else:
            return module


def mismatches(own: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Why `given` cannot be loaded into `own`: one phrase for each kind of difference, empty if it can."""
    differences = [_difference(name, own[name], given[name]) for name in own if name in given]
    found = {
        "missing": [name for name in own if name not in given],
        "unexpected": [name for name in given if name not in own],
        "different": [difference for difference in differences if difference],
    }
    return [f"{kind} {listed(names, NAMES_SHOWN)}" for kind, names in found.items() if names]


def _difference(name: str, own: Any, given: Any) -> str:
    if not isinstance(own, Tensor):  # a module's extra state: the module itself judges it
        return ""
    if not isinstance(given, Tensor):
        return f"{name} (a tensor here, {type(given).__name__} in the checkpoint)"
    if own.shape != given.shape:
        return f"{name} (shape {tuple(own.shape)} here, {tuple(given.shape)} in the checkpoint)"
    if own.dtype != given.dtype:
        return f"{name} (dtype {own.dtype} here, {given.dtype} in the checkpoint)"
    return ""
