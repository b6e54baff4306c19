"""What an uninterrupted run and a killed one have left, compared byte by byte, and key by key where clocks are read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from onstep.checkpoint import verify
from onstep.record import WALL_CLOCK_FIELDS, Record, read_records

EXACT = ("model/", "optimizer/", "scheduler/", "rng/", "dataset/", "loop/", "rank/")
"""Files of a checkpoint that must be the same to the byte; others may differ where they hold a wall-clock field."""
OWN = ("run_id", "created_at", "blake3")
"""Keys of a manifest that belong to the run, not to its course; and the hash over all of the manifest."""

Path_ = tuple[str, ...]


def differences(left: Any, right: Any, at: Path_ = ()) -> Iterator[Path_]:
    """The places where two JSON values differ; for values that are there on one side only, the place of those."""
    if isinstance(left, dict) and isinstance(right, dict):
        for key in [*left, *(key for key in right if key not in left)]:
            if key in left and key in right:
                yield from differences(left[key], right[key], (*at, key))
            else:
                yield (*at, key)
    elif isinstance(left, list) and isinstance(right, list):
        for number in range(max(len(left), len(right))):
            if number < min(len(left), len(right)):
                yield from differences(left[number], right[number], (*at, str(number)))
            else:
                yield (*at, str(number))
    elif json.dumps(left) != json.dumps(right):  # NaN equals NaN here
        yield at


def wall_clock_fields(places: list[Path_], of: str) -> set[str]:
    """Which of `WALL_CLOCK_FIELDS` the places are; a place that is none of them is a failure."""
    found = set()
    for place in places:
        fields = [field for field in WALL_CLOCK_FIELDS for key in place if fnmatchcase(key, field)]
        assert fields, f"{of} differs at {'/'.join(place)}"
        found.add(fields[0])
    return found


def compare(whole: Path, killed: Path) -> set[str]:
    """Check that two run directories tell the same course; returns the wall-clock fields in which they differ."""
    for name in ("certificate/chain.json", "model/model.safetensors"):
        assert (whole / name).read_bytes() == (killed / name).read_bytes(), name
    places = list(differences(read_records(whole / "trainer_logs.json"), read_records(killed / "trainer_logs.json")))
    found = wall_clock_fields(places, "the metrics log")
    places = list(differences(course(whole / "record.jsonl"), course(killed / "record.jsonl")))
    found |= wall_clock_fields(places, "the record")
    steps, there = _steps(whole), _steps(killed)
    # a process killed between its last save and the deletion of an older checkpoint leaves that one, too
    assert set(steps) <= set(there), f"the killed run has the checkpoints {there}, the other one {steps}"
    for step in steps:
        found |= compare_checkpoints(
            *(directory / "checkpoints" / f"checkpoint-{step}" for directory in (whole, killed))
        )
    return found


def course(record: Path) -> list[Record]:
    """The lines of a record without those about the processes of the run."""
    return [line for line in read_records(record) if line["kind"] not in ("start", "end")]


def compare_checkpoints(whole: Path, killed: Path) -> set[str]:
    """Check that two checkpoints hold the same; returns the wall-clock fields in which their states differ."""
    left, right = verify(whole), verify(killed)
    other = [path for path in left.files if path in right.files and left.files[path] != right.files[path]]
    found = set()
    for path in other:
        assert not path.startswith(EXACT), f"{path} of {killed} is another one"
        assert path.endswith(".json"), f"{path} of {killed} is another one"
        documents = [_document(directory, path) for directory in (whole, killed)]
        found |= wall_clock_fields(list(differences(*documents)), f"{path} of {killed}")
    manifests = [_document(directory, "manifest.json") for directory in (whole, killed)]
    places = list(differences(*manifests))
    found |= wall_clock_fields([place for place in places if place[0] == "metrics"], f"the manifest of {killed}")
    for place in places:
        is_of_other = place[0] == "files" and place[1] in other
        is_size_of_other = place[0] == "components" and place[-1] == "size_bytes" and _is_of(place[1], other)
        is_position = place == ("extra", "decisions", "position")  # in a file with times
        assert place[0] in (*OWN, "metrics") or is_position or is_of_other or is_size_of_other, (
            f"the manifest of {killed} differs at {place}"
        )
    return found


def _document(checkpoint: Path, path: str) -> Any:
    """A JSON file of a checkpoint, in which the directory of its run is named alike for every run."""
    return json.loads((checkpoint / path).read_text().replace(str(checkpoint.parents[1]), "run"))


def _is_of(component: str, paths: list[str]) -> bool:
    return any(path.startswith(f"{component}/") for path in paths)


def _steps(run: Path) -> list[int]:
    return sorted(int(path.name.partition("-")[2]) for path in (run / "checkpoints").glob("checkpoint-*"))
