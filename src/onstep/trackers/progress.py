"""Defines how far a tracker is: the place in its lines, and what it has from there on."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from onstep.config.trackers import NAMES
from onstep.files.bounded_reading import brief
from onstep.files.durability import replacing
from onstep.trackers.lines import Line, Lines

logger: logging.Logger = logging.getLogger(__name__)

_MOST_PLACES = 16
DIRECTORY = "trackers"
"""Directory of a run with a file per tracker."""


@dataclass(frozen=True)
class Place:
    """A place between the lines of two steps: what precedes it, the tracker has."""

    end: int = 0
    """The position, after a line of which `size` and `digest` are."""
    size: int = 0
    digest: str = ""
    state: Mapping[str, Any] = field(default_factory=dict)
    """The tracker's state there, if it can take back what follows."""
    next_size: int = 0
    """Of the line after it, with which a step begins; 0 if there was none."""
    next_digest: str = ""

    @property
    def line(self) -> Line:
        """The line before it, without its data."""
        return Line({}, self.end, self.size, self.digest)

    def is_in(self, lines: Lines) -> bool:
        """Whether the lines still have those around it: no more lines of the step before can follow it."""
        after = Line({}, self.end + self.next_size, self.next_size, self.next_digest)
        return lines.has(self.line) and (self.next_size == 0 or lines.has(after))


@dataclass(frozen=True)
class Progress:
    """What a tracker has; kept in the run's directory, `trackers/<name>.json`, or in checkpoints."""

    run_id: str = ""
    places: tuple[Place, ...] = ()
    """Oldest first: those before checkpoints, and the one before the newest step."""
    last: Place = field(default_factory=Place)
    """The place after the last line that it has."""
    step: int = -1
    """The highest step of which it has lines."""
    values: Mapping[str, float] = field(default_factory=dict)
    """What it shows at that step, by name."""
    num_own: int = 0
    """Number of lines for this tracker alone that it has of that step."""
    tags_until: int = -1
    """The highest step of which it has Megatron Bridge's tags."""
    tags: tuple[str, ...] = ()
    """The tags that it has of that step."""
    state: Mapping[str, Any] = field(default_factory=dict)
    """The tracker's own state, such as the id of its run."""
    names: tuple[str, ...] = ()
    """The naming schemes that it shows."""

    @property
    def place(self) -> Place:
        """The newest place."""
        return self.places[-1] if self.places else Place()

    def at(self, place: Place, is_checkpoint: bool) -> Progress:
        """The progress at a newer place, which replaces the newest one unless a checkpoint follows that."""
        is_kept = is_checkpoint or self.place.end == 0  # from where everything can be sent again
        places = self.places if is_kept else self.places[:-1]
        if len(places) > _MOST_PLACES:
            places = places[: _MOST_PLACES // 2 : 2] + places[_MOST_PLACES // 2 :]
        return replace(self, places=(*places, place))

    def in_lines(self, lines: Lines) -> Progress:
        """The progress up to the newest place that the lines still have, as after a rollback."""
        places = self.places
        while places and not places[-1].is_in(lines):
            places = places[:-1]
        return replace(self, places=places or (Place(),))

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: Any, where: str = "the checkpoint") -> Progress | None:
        """Read `state_dict()`; None, with a warning that says where it was, for anything else."""
        try:
            places, last = tuple(Place(**place) for place in state["places"]), Place(**state["last"])
            tuples = {name: tuple(state.get(name, ())) for name in ("names", "tags")}
            found = cls(**{**state, "places": places, "last": last, **tuples})
            numbers = (number for place in (*places, last) for number in (place.end, place.size, place.next_size))
            counts = (found.step, found.num_own, found.tags_until, *numbers)
            mappings = (found.values, found.state, *(place.state for place in found.places))
            is_valid = all(type(one) is int and -1 <= one < 2**63 for one in counts)
            is_valid = is_valid and all(isinstance(one, Mapping) for one in mappings) and isinstance(found.run_id, str)
            is_valid = is_valid and all(isinstance(one, (int, float)) for one in found.values.values())
            is_valid = is_valid and set(found.names) <= set(NAMES) and all(isinstance(one, str) for one in found.tags)
        except (AttributeError, KeyError, TypeError):
            is_valid = False
        if not is_valid:
            text = "the progress of a tracker in %s is ignored, and it gets the whole run again: %s"
            logger.warning(text, where, brief(state))
            return None
        return found


def file_name(tracker: str) -> str:
    """The name of the file with a tracker's progress."""
    return re.sub(r"[^\w.-]", "_", tracker).lstrip(".") + ".json"


def progress_of(run_id: str, file: Path | None, otherwise: Progress | None = None) -> Progress:
    """The progress of a run: that in a file, if it is of this run, or else the other one, or else none."""
    found = None if file is None else read_progress(file)
    for progress in (found, otherwise):
        if progress is not None and progress.run_id == run_id:
            return progress
    return Progress(run_id)


def read_progress(path: Path) -> Progress | None:
    """The progress in a file; None if there is none, or, with a warning, if it is damaged."""
    try:
        return Progress.from_state(json.loads(path.read_bytes()), str(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        logger.warning("%s cannot be read (%s): the tracker gets the whole run again", path, error)
        return None


def write_progress(path: Path, progress: Progress) -> None:
    """Replace the file atomically."""
    path.parent.mkdir(exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(progress.state_dict()), encoding="utf-8")
