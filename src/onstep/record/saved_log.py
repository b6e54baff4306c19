"""Finds the position of a checkpoint in a metrics log, which may have lost records, and those to write again."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import takewhile
from pathlib import Path
from typing import Any

from onstep.errors import CheckpointError
from onstep.files.bounded_reading import brief, parse_json
from onstep.files.json_values import encode
from onstep.record.digests import begins_with
from onstep.record.gaps import MISSING, gap_record
from onstep.record.metrics_log import MetricsLog
from onstep.record.reading import MetricsLogError, Record, read_records, without_wall_clock

MOST_WAITING = 100_000
"""Maximum number of records that wait in memory for disk space; a gap replaces the oldest ones beyond it."""
MOST_HELD = 10_000
"""Maximum number of records that a checkpoint holds."""
MOST_UNSYNCED = 1000
"""Maximum number of written records kept in memory until they are durable."""


@dataclass(frozen=True)
class Continuation:
    """How a file is continued from a checkpoint."""

    num_kept: int
    """Number of leading records of the file that the checkpoint covers."""
    to_append: list[str]
    """Encoded records that the file lacks: a gap, if records are lost, and those that the checkpoint holds."""
    gap: Record | None = None
    """The record that stands for lost records."""
    is_foreign: bool = False
    """Whether the file is not the one that the checkpoint continues."""
    change: str | None = None
    """How the file differs from what was written up to the checkpoint's last record, which it has; for messages."""


@dataclass(frozen=True)
class SavedLog:
    """The position of a checkpoint in a metrics log, and the records that the file might lack."""

    path: Path | None = None
    last_step: int = -1
    """Step of the last record; -1 if there is none."""
    num_records: int | None = 0
    """Number of records in the file; None if unknown."""
    first_record: str | None = None
    """Digest of the first record in the file; None if there is none, and in checkpoints before version 0.5."""
    last_record: str | None = None
    """Digest of the last record in the file."""
    num_bytes: int | None = None
    """Size of the file up to the end of its last record, while it is open; not saved, since it depends on the clock."""
    num_replaced: int = 0
    """Number of lost records that gaps among those in the file replace, less the number of these gaps."""
    digest: tuple[int, str] | None = None
    """Size of the file up to the end of its last record, and BLAKE3 of these bytes; None if unknown, as in checkpoints
    before version 0.5. It depends on the clock: `WALL_CLOCK_FIELDS` names it."""
    held: tuple[str, ...] = ()
    """Encoded records that follow, which could not be written or made durable: on a full disk, for example."""

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> SavedLog:
        """Read `state_dict()`, or that of an earlier version.

        Raises:
            CheckpointError: for a value of the wrong type; names it and the rule.
        """
        state = {"num_records": None, "num_replaced": 0, "held_records": [], "log_digest": None, **state}
        path = _checked(state, "log_path", "a path or None", lambda one: one is None or isinstance(one, str))
        held = _checked(state, "held_records", f"a list of at most {MOST_HELD} records as JSON", _are_records)
        rules = {
            "last_step": ("an integer >= -1", lambda one: _is_count(one, -1)),
            "num_records": ("an integer >= 0 or None", lambda one: one is None or _is_count(one, 0)),
            "num_replaced": ("an integer >= 0", lambda one: _is_count(one, 0)),
            "first_record": ("a digest or None", lambda one: one is None or isinstance(one, str)),
            "last_record": ("a digest or None", lambda one: one is None or isinstance(one, str)),
        }
        values = {name: _checked(state, name, *rule) for name, rule in rules.items()}
        found = _checked(state, "log_digest", "None, or a number of bytes and a digest", _is_digest)
        digest = None if found is None else (found[0], found[1])
        return cls(path=None if path is None else Path(path), held=tuple(held), digest=digest, **values)

    def state_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        place = {
            "log_path": None if self.path is None else str(self.path),
            "last_step": self.last_step,
            "num_records": self.num_records,
        }
        if self.path is None:
            return place
        file = {
            "first_record": self.first_record,
            "last_record": self.last_record,
            "num_replaced": self.num_replaced,
            "log_digest": None if self.digest is None else list(self.digest),
        }
        return {**place, **file, "held_records": list(self.held)}

    def is_as_written(self, path: Path) -> bool:
        """Whether the file begins with the bytes that the checkpoint covers, as far as it knows them."""
        return self.digest is None or begins_with(path, *self.digest)

    def continued(self, records: Sequence[Record], step: int, *, has_changed: bool = False) -> Continuation:
        """How to continue a file that now has these records, at `step`.

        Records that follow the checkpoint's are not kept. If its last record is not in the file, the file has lost its
        end (a power failure, an older copy), or is another run's.

        Args:
            has_changed: it is not `is_as_written`, so that records before its end may be lost.
        """
        position = self._position_in(records)
        if position is None and self.num_records is None:
            position = _num_up_to(records, max(step, self.last_step))
        if position is not None:
            num_written = sum(1 for _ in takewhile(_is_same, zip(records[position:], self.held, strict=False)))
            num_lost = self._num_lost(records[:position]) if has_changed else 0
            lost = gap_record(num_lost, None, self.last_step, self.last_record) if num_lost > 0 else None
            to_append = [*([] if lost is None else [encode(lost)]), *self.held[num_written:]]
            is_complete = position == self.num_records
            change = "its content has changed" if is_complete else f"it has {position} records, not {self.num_records}"
            return Continuation(position + num_written, to_append, lost, change=change if has_changed else None)
        is_foreign = bool(records) and self.first_record not in (None, _identity(records[0]))
        num_kept = 0 if is_foreign else min(_num_up_to(records, self.last_step), self.num_records or 0)
        after_step = step_of(records[num_kept - 1]) if num_kept else None
        gap = gap_record(max(self._num_lost(records[:num_kept]), 1), after_step, self.last_step, self.last_record)
        return Continuation(num_kept, [encode(gap), *self.held], gap, is_foreign)

    def _num_lost(self, kept: Sequence[Record]) -> int:
        """How many of the checkpoint's records these and their gaps do not stand for."""
        return (self.num_records or 0) + self.num_replaced - len(kept) - sum(map(_num_replaced, kept))

    def open_at_end(self, path: Path) -> tuple[MetricsLog, list[Record], Path | None] | None:
        """Open the file at the checkpoint's position, decoding only its ends: see `MetricsLog.open_at`.

        What precedes the position was durable before the checkpoint, so two records identify it. None if the file must
        be read as a whole: it is not as the checkpoint left it, or lacks records, or the position is an older one.
        """
        if not self.num_records or None in (self.first_record, self.last_record) or self.held:
            return None
        return MetricsLog.open_at(path, self._order, min(MOST_UNSYNCED, self.num_records), self._is_between)

    def _order(self, record: Record) -> int:
        """0 for what may be the last record, 1 for one that may follow it, -1 for one of an earlier step."""
        step = step_of(record)
        if step != self.last_step:
            return 1 if step > self.last_step else -1
        return 0 if _identity(record) == self.last_record else 1

    def read(self) -> list[Record] | None:
        """The records up to the position; None if the file no longer has them."""
        if self.path is None or self.num_bytes is None:
            return None
        try:
            records = read_records(self.path, self.num_bytes)
        except (OSError, MetricsLogError):
            return None
        return records if records and self._is_between(records[0], records[-1]) else None

    def _is_between(self, first: Record, last: Record) -> bool:
        """Whether the position is after records that begin and end with these."""
        return (_identity(first), _identity(last)) == (self.first_record, self.last_record)

    def _position_in(self, records: Sequence[Record]) -> int | None:
        """The number of records up to the last one that the checkpoint knows to be in the file; None if it is lost."""
        number, last = self.num_records, self.last_record
        if last is None:
            return number if number is not None and number <= len(records) else None
        if number is not None and 0 < number <= len(records) and _identity(records[number - 1]) == last:
            return number
        return next((at for at in range(len(records), 0, -1) if _identity(records[at - 1]) == last), None)


class NewestRecords:
    """The records of an open metrics log that the file, or its disk, may lack.

    Args:
        records: those in the file, or its last ones.
        position: what precedes the end of `records`, if they are not all.
    """

    def __init__(self, records: Sequence[Record] = (), position: SavedLog | None = None) -> None:
        self.num_records = len(records) if position is None else position.num_records or 0
        """Number of records in the file."""
        self.num_bytes: int | None = None
        """Size of the file up to the end of the last one."""
        self.digest: str | None = None
        """BLAKE3 of these bytes."""
        self.waiting: list[str] = []
        """Encoded records that are not in the file yet."""
        self.num_lost = 0
        """Number of records dropped because too many were waiting."""
        self._first = _identity(records[0]) if records else None
        self._num_replaced = sum(map(_num_replaced, records))
        if position is not None:
            self._first, self._num_replaced = position.first_record, position.num_replaced
        self._written = deque(map(encode, records[-MOST_UNSYNCED:]), maxlen=MOST_UNSYNCED)
        self._num_synced = 0
        self._is_sync_failing = False

    @property
    def steps_waiting(self) -> tuple[int, int]:
        """The steps of the first and of the last record that waits."""
        return step_of(json.loads(self.waiting[0])), step_of(json.loads(self.waiting[-1]))

    def add(self, text: str) -> None:
        """Let an encoded record wait to be written."""
        self.waiting.append(text)
        if len(self.waiting) > MOST_WAITING:
            self.num_lost += 1
            self.waiting = self._bounded(self.waiting, MOST_WAITING)

    def write(self, append: Callable[[str], None]) -> None:
        """Pass what waits to `append`, in order; what it refuses with an OSError stays."""
        num_written = 0
        try:
            for text in self.waiting:
                append(text)
                num_written += 1
        finally:
            self._written.extend(self.waiting[:num_written])
            self._num_replaced += _num_replaced_in(self.waiting[:num_written])
            if self._first is None and num_written:
                self._first = _identity(json.loads(self.waiting[0]))
            self.num_records += num_written
            del self.waiting[:num_written]

    def note_end(self, metrics_log: MetricsLog) -> None:
        """Note where the file ends and what it has, while it is open."""
        self.num_bytes, self.digest = metrics_log.num_bytes, metrics_log.digest

    def note_sync(self, is_durable: bool, num_records: int) -> None:
        """Note whether the first `num_records` records were made durable; may be called from another thread."""
        self._is_sync_failing = not is_durable
        if is_durable:
            self._num_synced = num_records

    def saved(self, path: Path) -> SavedLog:
        """The position for a checkpoint, with the records that may be lost."""
        written = list(self._written)
        num_unsynced = min(max(self.num_records - self._num_synced, 0), len(written)) if self._is_sync_failing else 0
        kept, unsynced = written[: len(written) - num_unsynced], written[len(written) - num_unsynced :]
        last = json.loads(kept[-1]) if kept else None
        num_bytes = None if last is None or self.num_bytes is None else self.num_bytes - _size_of(unsynced)
        return SavedLog(
            path=path,
            last_step=-1 if last is None else step_of(last),
            num_records=self.num_records - num_unsynced,
            first_record=self._first,
            last_record=None if last is None else _identity(last),
            num_bytes=num_bytes,
            num_replaced=self._num_replaced - _num_replaced_in(unsynced),
            digest=None if num_bytes is None or self.digest is None or unsynced else (num_bytes, self.digest),
            held=tuple(encode(json.loads(text)) for text in self._bounded([*unsynced, *self.waiting], MOST_HELD)),
        )

    def _bounded(self, texts: list[str], most: int) -> list[str]:
        """The newest records, at most `most`; a gap replaces the others."""
        surplus = len(texts) - most
        if surplus <= 0:
            return texts
        first, last = json.loads(texts[0]), json.loads(texts[surplus])
        number, after = surplus + 1, step_of(json.loads(self._written[-1])) if self._written else None
        earlier = first.get(MISSING)
        if isinstance(earlier, dict) and isinstance(earlier.get("number"), int):
            number, after = surplus + earlier["number"], earlier.get("after_step")
        return [encode(gap_record(number, after, step_of(last))), *texts[surplus + 1 :]]


def step_of(record: Record) -> int:
    """The step of a record; 0 if it has none."""
    step = record.get("global_step")
    return int(step) if isinstance(step, (int, float)) and abs(step) < 2**63 else 0


def _size_of(texts: Sequence[str]) -> int:
    """Bytes of encoded records in a metrics log that has others before them."""
    return sum(len(",\n") + len(text) for text in texts)


def _num_replaced(record: Record) -> int:
    """Number of records that a gap stands for beyond itself; 0 for any other record."""
    missing = record.get(MISSING)
    number = missing.get("number") if isinstance(missing, dict) else None
    return number - 1 if number is not None and _is_count(number, 1) else 0


def _num_replaced_in(texts: Sequence[str]) -> int:
    """The same of encoded records, few of which are decoded."""
    number = 0
    for text in texts:
        if f'"{MISSING}"' in text:
            number += _num_replaced(json.loads(text))
    return number


def _num_up_to(records: Sequence[Record], step: int) -> int:
    return sum(1 for _ in takewhile(lambda record: step_of(record) <= step, records))


def _is_same(pair: tuple[Record, str]) -> bool:
    """Whether a record is the encoded one."""
    return _identity(pair[0]) == _identity(json.loads(pair[1]))


def _identity(record: Record) -> str:
    """A digest of the record without what depends on the clock, or of the record that a gap ends with."""
    missing = record.get(MISSING)
    if isinstance(missing, dict) and isinstance(missing.get("last_record"), str):
        return str(missing["last_record"])
    return blake2b(encode(without_wall_clock(record)).encode(), digest_size=16).hexdigest()


def _checked(state: Mapping[str, Any], name: str, rule: str, is_valid: Callable[[Any], bool]) -> Any:
    value = state.get(name)
    if not is_valid(value):
        raise CheckpointError(
            f"the saved position in the metrics log has {name} = {brief(value)}, which must be {rule}; the checkpoint "
            f"is damaged: continue from another one (checkpoint.ckpt_step)."
        )
    return value


def _is_digest(value: Any) -> bool:
    if value is None:
        return True
    return isinstance(value, (list, tuple)) and len(value) == 2 and _is_count(value[0], 0) and isinstance(value[1], str)


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**63


def _are_records(value: Any) -> bool:
    if not isinstance(value, (list, tuple)) or len(value) > MOST_HELD:
        return False
    return all(isinstance(one, str) and isinstance(_parsed(one), dict) for one in value)


def _parsed(text: str) -> Any:
    return parse_json(text, "a record held by the checkpoint", error=CheckpointError, max_nesting=1000)
