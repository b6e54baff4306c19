"""Finds another package's own objects where Onstep's have taken their place (`onstep.exchange`)."""

from __future__ import annotations

import importlib
import sys
from typing import Any

ORIGINALS = "__onstep_originals__"
"""Attribute of a module in which names were exchanged: its own objects by name."""


def is_exchanged() -> bool:
    """Whether the name Trainer of `transformers` means Onstep's in this process."""
    module = sys.modules.get("transformers.trainer")
    return module is not None and "Trainer" in vars(module).get(ORIGINALS, {})


def original(module: str, name: str) -> Any:
    """The object that a module itself defines under this name, exchanged or not."""
    found = importlib.import_module(module)
    kept: dict[str, Any] = vars(found).get(ORIGINALS, {})
    return kept[name] if name in kept else getattr(found, name)
