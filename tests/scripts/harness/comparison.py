"""Compares what a script left behind under `transformers` and under Onstep."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fnmatch import fnmatch
from typing import Any

TOLERANCE = 1e-4
"""Largest difference of a loss or metric, absolute below 1 and relative above."""

FILES_WITHOUT_COUNTERPART = {
    "training_args.bin": "a pickle; the arguments are in training_args.json",
    "checkpoint-*/training_args.bin": "a pickle; the arguments are in the checkpoint's own files",
    "checkpoint-*/optimizer.pt": "a pickle; safetensors and JSON of the checkpoint",
    "checkpoint-*/scheduler.pt": "a pickle; safetensors and JSON of the checkpoint",
    "checkpoint-*/rng_state*.pth": "a pickle; safetensors and JSON of the checkpoint",
}
"""Files that `transformers` writes and Onstep does not, and why."""
NAMES_WITHOUT_COUNTERPART: dict[str, str] = {}
"""Names of metrics, or of keys of `trainer_state.json`, that only `transformers` has, and why."""
MEASURED = ("*_runtime", "*_per_second", "total_flos", "*_loading_time")
"""Names whose values are those of the machine or of an estimate; only the name must be there."""
STATE_VALUES = (
    "best_global_step",
    "best_metric",
    "epoch",
    "eval_steps",
    "global_step",
    "logging_steps",
    "max_steps",
    "num_train_epochs",
    "save_steps",
    "train_batch_size",
)
"""Keys of `trainer_state.json` that tools read, beside the log."""


def differences(theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """What differs, one line each; an empty list where a user finds the same."""
    found = (compare(theirs, ours) for compare in (_files, _configs, _results, _state, _log, _weights))
    return [line for lines in found for line in lines]


def _files(theirs: dict[str, Any], ours: dict[str, Any]) -> Iterator[str]:
    for name in sorted(set(theirs["files"]) - set(ours["files"])):
        if not any(fnmatch(name, pattern) for pattern in FILES_WITHOUT_COUNTERPART):
            yield f"{name} is missing"


def _configs(theirs: dict[str, Any], ours: dict[str, Any]) -> Iterator[str]:
    for name, expected in theirs["configs"].items():
        yield from _values(name, expected, ours["configs"].get(name, {}))


def _results(theirs: dict[str, Any], ours: dict[str, Any]) -> Iterator[str]:
    for name, expected in theirs["results"].items():
        yield from _values(name, expected, ours["results"].get(name, {}))


def _state(theirs: dict[str, Any], ours: dict[str, Any]) -> Iterator[str]:
    expected, found = theirs["state"], ours["state"]
    for name in sorted(expected.keys() - found.keys() - NAMES_WITHOUT_COUNTERPART.keys()):
        yield f"trainer_state.json: no {name}"
    yield from _values(
        "trainer_state.json", *({key: state.get(key) for key in STATE_VALUES} for state in (expected, found))
    )
    for name in ("last_checkpoint", "best_checkpoint"):
        if theirs[name] != ours[name]:
            yield f"{name}: {theirs[name]}, here {ours[name]}"


def _log(theirs: dict[str, Any], ours: dict[str, Any]) -> Iterator[str]:
    found = ours["state"]["log_history"]
    for expected in theirs["state"]["log_history"]:
        where = f"{_kind(expected)} record of step {expected['step']}"
        same = [record for record in found if record["step"] == expected["step"] and _kind(record) == _kind(expected)]
        yield from _values(where, expected, {key: value for record in same for key, value in record.items()})


def _kind(record: dict[str, Any]) -> str:
    if "train_runtime" in record:
        return "final"
    return "training" if "loss" in record else "evaluation"


def _weights(theirs: dict[str, Any], ours: dict[str, Any]) -> Iterator[str]:
    for name in ("final_is_last", "final_is_best"):
        if theirs[name] != ours[name]:
            yield f"{name}: {theirs[name]}, here {ours[name]}"
    yield from _values("norms of the loaded weights", theirs["norms"], ours["norms"])


def _values(where: str, expected: dict[str, Any], found: dict[str, Any]) -> Iterator[str]:
    for name, value in expected.items():
        if name in NAMES_WITHOUT_COUNTERPART:
            continue
        if name not in found:
            yield f"{where}: no {name}"
        elif not any(fnmatch(name, pattern) for pattern in MEASURED) and not _is_same(value, found[name]):
            yield f"{where}: {name} is {value}, here {found[name]}"


def _is_same(expected: Any, found: Any) -> bool:
    if isinstance(expected, float) and isinstance(found, (int, float)):
        return math.isclose(expected, found, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return bool(expected == found)
