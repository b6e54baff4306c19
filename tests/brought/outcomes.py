"""What a run has left behind, and how two of them differ."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

TIMES = re.compile(r"runtime|step_time|_per_second|tok_per_sec|preparation_time")
"""Keys of times and speeds."""
_AT_END = re.compile(r"'train_runtime': '?([0-9.e+-]+)'?.*'train_loss': '?([0-9.e+-]+)'?")
_IN_PLACE = {
    "optimizer.pt": "optimizer/state.json",
    "scheduler.pt": "scheduler/state.json",
    "rng_state.pth": "rng/rank_0.json",
    "training_args.bin": "training_args.json",
    "pytorch_model.bin": "model.safetensors",
    **{f"rng_state_{rank}.pth": f"rng/rank_{rank}.json" for rank in range(8)},
}
"""Onstep's files in the place of pickles, as the page for people who come from Hugging Face has them."""

Record = dict[str, Any]


@dataclass
class Outcome:
    """A finished run of a program.

    Args:
        output: its output directory.
        printed: what it printed.
        seconds: from the start of the process to its end.
    """

    output: Path
    printed: str
    seconds: float

    def records(self) -> list[Record]:
        """The logged records of the newest state, without the summary of the training."""
        return [record for record in self._history() if "train_runtime" not in record]

    def summary(self) -> Record:
        """`train_runtime` and `train_loss`, from the records, or rounded from what Hugging Face prints."""
        for record in reversed(self._history()):
            if "train_runtime" in record:
                return {name: record[name] for name in ("train_runtime", "train_loss")}
        found = _AT_END.findall(self.printed)
        return dict(zip(("train_runtime", "train_loss"), map(float, found[-1]), strict=True)) if found else {}

    def weights(self) -> dict[str, torch.Tensor]:
        """All tensors of safetensors outside of checkpoints and what a restart has set aside, by file and name."""
        return dict(self._tensors())

    def files(self) -> set[str]:
        """The paths of all files in the output directory."""
        return {path.relative_to(self.output).as_posix() for path in self.output.rglob("*") if path.is_file()}

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for path in sorted(self.output.rglob("*.safetensors")):
            place = path.relative_to(self.output)
            if place.parts[0].startswith(("checkpoint", "aside")):
                continue
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 - it is not a mapping
                    yield f"{place}: {name}", file.get_tensor(name)

    def _history(self) -> list[Record]:
        states = [json.loads(path.read_text()) for path in self.output.rglob("trainer_state.json")]
        newest = max(states, key=lambda state: (state["global_step"], len(state["log_history"])))
        history: list[Record] = newest["log_history"]
        return history


@dataclass
class Difference:
    """How far a run is from another.

    Args:
        records: the largest difference of a logged value, and its key.
        weights: the largest difference of a final weight.
        missing: files of the first that the second lacks, and keys of its records.
    """

    records: tuple[float, str]
    weights: float
    missing: list[str]

    @property
    def largest(self) -> float:
        """Of records and weights."""
        return max(self.records[0], self.weights)


def compare(first: Outcome, second: Outcome) -> Difference:
    """How the second run differs from the first: infinitely where it has other records or tensors."""
    records, missing = _of_records(first.records(), second.records())
    ends = first.summary(), second.summary()
    if all(ends):
        digits = 10.0 ** (-3 + math.floor(math.log10(abs(ends[0]["train_loss"]) or 1)))  # Hugging Face prints four
        is_rounded = not any("train_loss" in record for record in first._history())
        away = abs(ends[0]["train_loss"] - ends[1]["train_loss"])
        records = max(records, (max(0.0, away - digits / 2) if is_rounded else away, "train_loss"))
    missing += sorted(name for name in first.files() - second.files() if not _is_in_place(name, second.output))
    return Difference(records, _of_weights(first.weights(), second.weights()), missing)


def is_same(first: Outcome, second: Outcome) -> list[str]:
    """What of a run under `onstep run` is not equal to the bit in another: names of weights and keys of records."""
    ours, theirs = first.weights(), second.weights()
    unequal = sorted(name for name in ours.keys() | theirs.keys() if not _equal(ours.get(name), theirs.get(name)))
    one, other = first.records(), second.records()
    if len(one) != len(other):
        unequal.append(f"{len(one)} records, {len(other)} after kills")
    for before, after in zip(one, other, strict=False):
        keys = {key for key in before.keys() | after.keys() if not TIMES.search(key)}
        unequal += [
            f"{key} at step {before.get('step')}: {before.get(key)} and {after.get(key)}"
            for key in sorted(keys)
            if before.get(key) != after.get(key) and not _both_nan(before.get(key), after.get(key))
        ]
    return unequal


def _of_records(first: list[Record], second: list[Record]) -> tuple[tuple[float, str], list[str]]:
    if len(first) != len(second):
        return (math.inf, f"{len(first)} and {len(second)} records"), []
    worst, missing = (0.0, ""), set()
    for before, after in zip(first, second, strict=True):
        for key, value in before.items():
            if key not in after:
                missing.add(f"record: {key}")
            elif isinstance(value, (int, float)) and not TIMES.search(key) and not _both_nan(value, after[key]):
                worst = max(worst, (abs(value - after[key]), f"{key} at step {before['step']}"))
            elif isinstance(value, str) and value != after[key]:
                worst = (math.inf, key)
    return worst, sorted(missing)


def _of_weights(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    if not first or first.keys() - second.keys():
        return math.inf
    differences = [
        (value.double() - second[name].double()).abs().max().item() if value.shape == second[name].shape else math.inf
        for name, value in first.items()
        if value.numel()
    ]
    return max(differences, default=0.0)


def _is_in_place(name: str, output: Path) -> bool:
    path = output / name
    instead = _IN_PLACE.get(path.name)
    return instead is not None and (path.parent / instead).exists()


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is not None and other is not None and torch.equal(one, other)


def _both_nan(one: object, other: object) -> bool:
    return one != one and other != other
