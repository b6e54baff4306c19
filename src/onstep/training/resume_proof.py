"""Whether two runs took the same course, step by step: the proof behind `onstep verify-resume`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from onstep.journal import Record, read_records, without_wall_clock
from onstep.training.certificate import ITEMS
from onstep.training.run_folder import RunFolder

ABSENT = "nothing"


@dataclass(frozen=True)
class Difference:
    """The first thing in which two runs differ."""

    item: str
    """One of `ITEMS`, or what else is compared."""
    left: str
    right: str
    step: int | None = None
    """None for what belongs to the whole run."""
    rank: int | None = None
    """None for what is not a rank's own."""

    def __str__(self) -> str:
        step = [] if self.step is None else [f"step {self.step}"]
        rank = [] if self.rank is None else [f"rank {self.rank}"]
        where = ", ".join(step + rank)
        return f"{where}{': ' if where else ''}{self.item} differs, {self.left} and {self.right}"


def first_difference(left: Path, right: Path) -> Difference | None:
    """The first difference between the runs in two folders, both made with `checkpoint.certify`; None if equal.

    Compared are the certificates of all ranks (the earliest step first, within it rank by rank), the final weights and
    the journals without wall-clock fields.

    Raises:
        FileNotFoundError: where the first folder has no certificate.
    """
    steps = [one for one in _certificate_differences(left, right) if one is not None]
    if steps:
        return min(steps, key=lambda one: (one.step or 0, one.rank or 0))
    return _weights_difference(left, right) or _journal_difference(left, right)


def certificates(run: Path) -> dict[int, Path]:
    """The certificates of a run by rank."""
    found = (run / "certificate").glob("rank_*.json")
    return {int(path.stem.partition("_")[2]): path for path in sorted(found) if path.stem[5:].isdigit()}


def _certificate_differences(left: Path, right: Path) -> Iterator[Difference | None]:
    ours, theirs = certificates(left), certificates(right)
    if not ours:
        raise FileNotFoundError(f"{left} has no certificate; make the run with checkpoint.certify=true.")
    for rank in sorted({*ours, *theirs}):
        yield _difference_of_rank(rank, *(read_records(one[rank]) if rank in one else [] for one in (ours, theirs)))


def _difference_of_rank(rank: int, ours: list[Record], theirs: list[Record]) -> Difference | None:
    """Where two certificates part: the first step, and in it the first item."""
    for number in range(max(len(ours), len(theirs))):
        if number >= min(len(ours), len(theirs)):
            longer = ours if number < len(ours) else theirs
            told = [f"step {one[number]['step']}" if number < len(one) else ABSENT for one in (ours, theirs)]
            return Difference("the number of steps", told[0], told[1], int(longer[number]["step"]), rank)
        one, other = ours[number], theirs[number]
        for item in ("step", *ITEMS, "chain"):
            if one.get(item) != other.get(item):
                told = [_told(item, each.get(item)) for each in (one, other)]
                return Difference(item, told[0], told[1], int(one["step"]), rank)
    return None


def _told(item: str, value: Any) -> str:
    """A float as people read it, beside its exact hexadecimal form; digests as they are."""
    if item in ("loss", "learning_rate") and isinstance(value, str):
        return f"{float.fromhex(value):.9g} ({value})"
    return str(value)


def _weights_difference(left: Path, right: Path) -> Difference | None:
    digests = [_digests(RunFolder(run).model) for run in (left, right)]
    for name in sorted({*digests[0], *digests[1]}):
        ours, theirs = (one.get(name, ABSENT) for one in digests)
        if ours != theirs:
            return Difference(f"the final weights' file {name}", ours, theirs)
    return None


def _digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.glob("*") if path.is_file())
    return {path.name: blake3(path.read_bytes()).hexdigest(length=16) for path in files}


def _journal_difference(left: Path, right: Path) -> Difference | None:
    journals = [RunFolder(run).journal for run in (left, right)]
    ours, theirs = ([without_wall_clock(one) for one in read_records(path)] for path in journals)
    for number in range(max(len(ours), len(theirs))):
        one = ours[number] if number < len(ours) else {}
        other = theirs[number] if number < len(theirs) else {}
        for key in [*one, *(key for key in other if key not in one)]:
            told = [json.dumps(each[key]) if key in each else ABSENT for each in (one, other)]
            if told[0] != told[1]:
                step = one.get("global_step", other.get("global_step"))
                return Difference(f"{key} in the journal", told[0], told[1], step)
    return None
