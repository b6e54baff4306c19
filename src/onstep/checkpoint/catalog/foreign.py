"""Describes directories that other programs have written where a checkpoint is looked for."""

from __future__ import annotations

import os
import re
from pathlib import Path

from onstep.checkpoint.catalog.unfinished import is_unfinished
from onstep.config.suggestions import listed

_SAFE_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
_PICKLED_WEIGHTS = re.compile(r"pytorch_model(-\d+-of-\d+)?\.bin(\.index\.json)?")
_PICKLED_STATE = re.compile(r"(optimizer|scheduler|scaler|training_args|rng_state(_\d+)?)\.(pt|pth|bin)")
_TRAINER_STATE = "trainer_state.json"
NAMES_SHOWN = 4
"""How many names the message lists; the remaining ones are counted."""


def describe_foreign(directory: Path) -> str | None:
    """Describe a Hugging Face directory and how to use its weights, or an unfinished one; None for any other directory.

    A directory counts as one if it has weights named as by `save_pretrained`, or the state that HF Trainer saves.
    """
    if is_unfinished(directory):
        return f"{directory} is unfinished: its run was killed while saving it."
    try:
        names = sorted(entry for entry in os.listdir(directory) if _is_known(entry))
    except OSError:
        return None
    if not names:
        return None
    shown = listed(names, NAMES_SHOWN)
    return f"{directory} is a Hugging Face directory ({shown}), not an Onstep checkpoint. {_way(directory, names)}"


def _is_known(name: str) -> bool:
    patterns = (_SAFE_WEIGHTS, _PICKLED_WEIGHTS, _PICKLED_STATE)
    return name == _TRAINER_STATE or any(pattern.fullmatch(name) for pattern in patterns)


def _way(directory: Path, names: list[str]) -> str:
    """How to use the files that are present."""
    has_safe, has_pickled, has_state = (
        any(map(pattern.fullmatch, names)) for pattern in (_SAFE_WEIGHTS, _PICKLED_WEIGHTS, _PICKLED_STATE)
    )
    parts = ["Its pickle files are not read: a pickle can run arbitrary code."] if has_pickled or has_state else []
    load = f"AutoModelForCausalLM.from_pretrained({str(directory)!r})"
    if has_pickled and not has_safe:
        parts.append(f"If you trust it, convert it once: {load}.save_pretrained('NEW_DIR') writes safetensors.")
        load, has_safe = "AutoModelForCausalLM.from_pretrained('NEW_FOLDER')", True
    if has_safe:
        parts.append(f"To start a new run from the weights, load them with transformers, {load}, and pass the model.")
    else:
        parts.append("It holds no usable weights; give an Onstep checkpoint.")
    return " ".join(parts)
