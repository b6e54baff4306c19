"""Keeps the weights that a user's code writes to a checkpoint where other programs look for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from safetensors import SafetensorError, safe_open

from onstep.checkpoint import StateComponent
from onstep.checkpoint.components import tensors_at
from onstep.distributed import World


def beside_weights_of_others(components: list[StateComponent], directory: Path, world: World) -> list[StateComponent]:
    """The components to save where the `_save` of a user or a library has written to `directory`. Collective.

    If its weights have names that the model lacks, as with sentence-transformers, their file stays, and the run's own
    weights are written to a directory of their own, from which they are loaded.
    """
    at_root = next((one for one in components if one.at_root), None)
    if at_root is None:
        return components
    path = directory / tensors_at(at_root.key, at_root=True)
    keeps = world.share(world.is_main and _has_other_names(path, at_root))
    return [replace(one, at_root=False) if keeps and one is at_root else one for one in components]


def _has_other_names(path: Path, component: StateComponent) -> bool:
    try:
        with safe_open(path, "pt") as opened:
            return not component.stateful.state_dict().keys() >= set(opened.keys())
    except FileNotFoundError:
        return False
    except (SafetensorError, OSError):
        return True
