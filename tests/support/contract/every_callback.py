"""Every callback of the package, by discovery, and how each is made for a run in a directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onstep.callbacks
from onstep.events import Callback, TrainerCallback


def discovered() -> dict[str, type[Any]]:
    """The callback classes of `onstep.callbacks` by name; an alias of a class is no second one."""
    exported = {name: getattr(onstep.callbacks, name) for name in onstep.callbacks.__all__}
    return {
        name: one
        for name, one in exported.items()
        if isinstance(one, type) and issubclass(one, Callback | TrainerCallback) and one.__name__ == name
    }


def _writer(directory: Path) -> Any:
    return onstep.callbacks.ResumableSummaryWriter(str(directory / "tensorboard"))


MAKE: dict[str, Callable[[Path], list[Any]]] = {
    "TBLogger": lambda directory: [
        onstep.callbacks.TBLogger(writer := _writer(directory), experiment_info={"note": "contract"}),
        writer,
    ],
    "ResumableSummaryWriter": lambda directory: [_writer(directory)],
    "TextgenCallback": lambda directory: [
        onstep.callbacks.TextgenCallback(writer := _writer(directory), ["def ", "x"], max_new_tokens=3),
        writer,
    ],
    "ProfilerCallback": lambda directory: [
        onstep.callbacks.ProfilerCallback(num_steps=2, output_dir=str(directory / "profiles"), with_stack=False)
    ],
    "TrackersCallback": lambda directory: [onstep.callbacks.TrackersCallback("csv")],
    "EarlyStopping": lambda directory: [onstep.callbacks.EarlyStopping(patience=50)],
    "EarlyStoppingCallback": lambda directory: [onstep.callbacks.EarlyStoppingCallback(early_stopping_patience=50)],
    "DivergenceDetector": lambda directory: [onstep.callbacks.DivergenceDetector(threshold=50.0)],
    "EMA": lambda directory: [onstep.callbacks.EMA(decay=0.5, apply_at_end=False)],
    "WeightAverage": lambda directory: [onstep.callbacks.WeightAverage(apply_at_end=False)],
    "JsonLogger": lambda directory: [onstep.callbacks.JsonLogger(note="contract")],
    "LmEvalCallback": lambda directory: [onstep.callbacks.LmEvalCallback("facts", every=2)],
    "ProgressCallback": lambda directory: [onstep.callbacks.ProgressCallback(use_tqdm=False)],
    "TraceMalloc": lambda directory: [onstep.callbacks.TraceMalloc(top_k=2, comprehensive_mode=False)],
}
"""How those are made that need arguments, or that would otherwise not do their work in a small run."""


def make(name: str, directory: Path) -> list[Any]:
    """The callback called `name`, with what it needs beside it; it comes first."""
    return MAKE[name](directory) if name in MAKE else [discovered()[name]()]
