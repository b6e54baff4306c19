"""Keeps what has happened in a search with Ray Tune: `trials.jsonl` in its directory, which the search appends to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onstep.analysis.logs.record_file import objects_in
from onstep.analysis.logs.samples_log import append_lines
from onstep.files.json_values import encode

FILE = "trials.jsonl"
"""One line for each trial that begins, for each of its results and for its end, in the order in which they happened."""
TRIAL, NAME, PARAMETERS, RESULT, ENDED = "trial", "name", "parameters", "result", "ended"
"""Keys of these lines."""

Line = dict[str, Any]


@dataclass
class PastTrial:
    """A trial as the file has it."""

    name: str
    """Of its directory."""
    parameters: dict[str, Any]
    results: list[dict[str, Any]] = field(default_factory=list)
    """In order, as Ray has received them."""
    has_ended: bool = False


class TrialLog:
    """The file of a search, which one process appends to and those of the trials read.

    Args:
        directory: that of the search.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE

    def lines(self) -> list[Line]:
        """All lines so far."""
        return list(objects_in(self._path))

    def append(self, trial: str, **content: Any) -> None:
        """Append a line about a trial.

        Raises:
            OSError: if it cannot be written.
        """
        append_lines(self._path, [encode({TRIAL: trial, **content})])


def trials_in(lines: list[Line]) -> dict[str, PastTrial]:
    """The trials that these lines tell of, by their ids."""
    found: dict[str, PastTrial] = {}
    for line in lines:
        if NAME in line:
            found[line[TRIAL]] = PastTrial(line[NAME], line[PARAMETERS])
        past = found.get(line[TRIAL])
        if past is not None:
            past.results += [line[RESULT]] if RESULT in line else []
            past.has_ended |= ENDED in line
    return found


def plain(result: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers and texts of a flat result of Ray's, without the parameters of the trial."""
    kept = {name: value for name, value in result.items() if isinstance(value, int | float | str)}
    return {name: value for name, value in kept.items() if not name.startswith("config/")}
