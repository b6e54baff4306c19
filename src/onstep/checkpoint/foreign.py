"""Folders that other trainers wrote: told apart by their names alone, and never opened."""

from __future__ import annotations

import os
import re
from pathlib import Path

_SAFE_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
_PICKLED_WEIGHTS = re.compile(r"pytorch_model(-\d+-of-\d+)?\.bin(\.index\.json)?")
_PICKLED_STATE = re.compile(r"(optimizer|scheduler|scaler|training_args|rng_state(_\d+)?)\.(pt|pth|bin)")
_TRAINER_STATE = "trainer_state.json"
NAMES_SHOWN = 4
"""Names that the message lists; the rest is counted."""


def describe_foreign(folder: Path) -> str | None:
    """What a Hugging Face folder is and how its weights can be used; None for any other folder.

    A folder counts as one if it has weights under the names of `save_pretrained`, or the state that its trainer saves.
    """
    try:
        names = sorted(entry for entry in os.listdir(folder) if _is_known(entry))
    except OSError:
        return None
    if not names:
        return None
    return f"{folder} is no checkpoint of Onstep but a folder in Hugging Face's form ({_listed(names)}). {_way(folder)}"


def _is_known(name: str) -> bool:
    patterns = (_SAFE_WEIGHTS, _PICKLED_WEIGHTS, _PICKLED_STATE)
    return name == _TRAINER_STATE or any(pattern.fullmatch(name) for pattern in patterns)


def _way(folder: Path) -> str:
    """What to do with the files that are there."""
    names = os.listdir(folder)
    is_pickled = any(_PICKLED_WEIGHTS.fullmatch(name) or _PICKLED_STATE.fullmatch(name) for name in names)
    parts = ["Its pickled files are not read: reading a pickle can run any code."] if is_pickled else []
    load = f"AutoModelForCausalLM.from_pretrained({str(folder)!r})"
    has_safe = any(_SAFE_WEIGHTS.fullmatch(name) for name in names)
    if not has_safe and any(_PICKLED_WEIGHTS.fullmatch(name) for name in names):
        parts.append(f"Where you trust it, convert it once: {load}.save_pretrained('NEW_FOLDER') writes safetensors.")
        load, has_safe = "AutoModelForCausalLM.from_pretrained('NEW_FOLDER')", True
    if has_safe:
        parts.append(f"To start a new run from the weights, load them with transformers, {load}, and pass the model.")
    else:
        parts.append("It holds no weights that could be used; give a checkpoint of Onstep.")
    return " ".join(parts)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more
