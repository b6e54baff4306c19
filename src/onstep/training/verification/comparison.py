"""Compares two runs that were certified, for `onstep verify-resume`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from blake3 import blake3

from onstep.record import Record, read_records, without_wall_clock
from onstep.training.runs.run_dir import RunDir
from onstep.training.verification.trajectory_hash import ITEMS, hash_chains

ABSENT = "nothing"
_NO_RECORD: Record = {}
_OF_RUN, _OF_RANKS = "one chain of the run", "a chain of each rank (by an older version of Onstep)"
_MODEL_CARD = "README.md"
"""Describes a run beside its weights, also by seconds, which differ between equal runs."""


@dataclass(frozen=True)
class Difference:
    """The first difference between two runs."""

    item: str
    """One of `ITEMS`, or a description of what else was compared."""
    left: str
    right: str
    step: int | None = None
    """None if it concerns the whole run."""
    rank: int | None = None
    """None if it does not belong to a single rank."""

    def __str__(self) -> str:
        return self.described("rank {}".format)

    def described(self, place: Callable[[int], str]) -> str:
        """The difference in a line; `place` names a rank."""
        of_step = [] if self.step is None else [f"step {self.step}"]
        where = ", ".join(of_step if self.rank is None else [*of_step, place(self.rank)])
        return f"{where}{': ' if where else ''}{self.item} differs, {self.left} and {self.right}"


def first_difference(left: Path, right: Path) -> Difference | None:
    """The first difference between the runs in two directories, both run with `checkpoint.certify`; None if equal.

    Compares the trajectory hashes (earliest step first, then by item, then by rank), the final weights (not their model
    card, which tells seconds), and the metrics logs without their wall-clock fields. The hashes of each rank that older
    versions wrote are compared with each other.

    Raises:
        FileNotFoundError: if the first directory has no trajectory hash.
    """
    ours, theirs = hash_chains(left), hash_chains(right)
    if not ours:
        raise FileNotFoundError(f"{left} has no trajectory hash; run it with checkpoint.certify=true.")
    if theirs and (None in ours) != (None in theirs):
        left_format, right_format = (_OF_RUN if None in one else _OF_RANKS for one in (ours, theirs))
        return Difference("the format of the trajectory hash", left_format, right_format)
    found = []
    for rank in sorted({*ours, *theirs}, key=lambda one: one or 0):
        records = (read_records(one[rank]) if rank in one else [] for one in (ours, theirs))
        difference = _difference_of_chains(rank, *records)
        if difference is not None:
            found.append(difference)
    if found:
        return min(found, key=lambda one: (one.step or 0, one.rank or 0))
    return _weights_difference(left, right) or _metrics_log_difference(left, right)


def _difference_of_chains(rank: int | None, ours: list[Record], theirs: list[Record]) -> Difference | None:
    """The first step, and in it the first item, where two trajectory hashes differ."""
    for one, other in zip_longest(ours, theirs, fillvalue=_NO_RECORD):
        step = int((one or other)["step"])
        if not (one and other):
            left, right = (f"step {step}" if each else ABSENT for each in (one, other))
            return Difference("the number of steps", left, right, step, rank)
        for item in ("step", *ITEMS, "chain"):
            pair = one.get(item), other.get(item)
            if pair[0] != pair[1]:
                return _difference_of_values(item, step, rank, *pair)
    return None


def _difference_of_values(item: str, step: int, rank: int | None, ours: object, theirs: object) -> Difference:
    """The difference in an item: of the first rank that differs, if it has values by rank."""
    num_ranks = [len(one) for one in (ours, theirs) if isinstance(one, list)]
    if len(set(num_ranks)) == 2:
        return Difference(f"the number of ranks with {item}", str(num_ranks[0]), str(num_ranks[1]), step)
    if num_ranks:
        left, right = (one if isinstance(one, list) else [one] * num_ranks[0] for one in (ours, theirs))
        rank = next(number for number, pair in enumerate(zip(left, right, strict=True)) if pair[0] != pair[1])
        ours, theirs = left[rank], right[rank]
    return Difference(item, _value_text(item, ours), _value_text(item, theirs), step, rank)


def _value_text(item: str, value: object) -> str:
    """A float in readable form next to its exact hexadecimal form; digests unchanged."""
    if item in ("loss", "learning_rate") and isinstance(value, str):
        return f"{float.fromhex(value):.9g} ({value})"
    return str(value)


def _weights_difference(left: Path, right: Path) -> Difference | None:
    digests = [_digests(RunDir(run).model) for run in (left, right)]
    for name in sorted({*digests[0], *digests[1]}):
        ours, theirs = (one.get(name, ABSENT) for one in digests)
        if ours != theirs:
            return Difference(f"the final weights' file {name}", ours, theirs)
    return None


def _digests(directory: Path) -> dict[str, str]:
    files = sorted(path for path in directory.glob("*") if path.is_file() and path.name != _MODEL_CARD)
    return {path.name: blake3(path.read_bytes()).hexdigest(length=16) for path in files}


def _metrics_log_difference(left: Path, right: Path) -> Difference | None:
    metrics_logs = [RunDir(run).metrics_log for run in (left, right)]
    ours, theirs = ([without_wall_clock(one) for one in read_records(path)] for path in metrics_logs)
    for one, other in zip_longest(ours, theirs, fillvalue=_NO_RECORD):
        for key in one | other:
            texts = [json.dumps(each[key]) if key in each else ABSENT for each in (one, other)]
            if texts[0] != texts[1]:
                step = one.get("global_step", other.get("global_step"))
                return Difference(f"{key} in the metrics log", texts[0], texts[1], step)
    return None
