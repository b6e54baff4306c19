"""Reads files of records, even those that are being written or whose writer was killed."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from onstep.errors import OnstepError
from onstep.record.decoding import Decoded, decode
from onstep.record.forms import ARRAY, form_of

Record = dict[str, Any]

WALL_CLOCK_FIELDS = (
    "timestamp",
    "*_runtime",
    "*_per_second",
    "*_per_second_per_device",
    "seconds_*",
    "goodput",
    "tok_per_sec",
    "mfu",
    "peak_mem",
    "peak_mem_allocated",
    "bridge",
    "log_digest",
    "record_position",
)
"""Fields that depend on time or machine; all others are identical in a run that was killed and resumed."""


class MetricsLogError(OnstepError):
    """A file is not a metrics log, or an operation on a metrics log would lose records."""


class DamagedMetricsLogError(MetricsLogError):
    """A metrics log is damaged before its last record.

    Attributes:
        records: those before the damage.
    """

    def __init__(self, message: str, records: list[Record]) -> None:
        super().__init__(message)
        self.records = records


def read_records(path: str | Path, num_bytes: int | None = None) -> list[Record]:
    """Read the records of a metrics log, even one that is being written or whose writer was killed.

    Tolerates a missing closing bracket, a trailing comma and a truncated last record, which is skipped. An empty file
    has no records.

    Args:
        num_bytes: Where the last record to read ends; None reads all.
        path: the file, `trainer_logs.json` of a run.

    Raises:
        FileNotFoundError: if the file does not exist.
        MetricsLogError: if the file is not a metrics log, or is damaged before its last record.
    """
    path = Path(path)
    if path.exists() and not (path.is_file() or path.is_dir()):  # a named pipe or a device does not end by itself
        raise MetricsLogError(f"{path} is not a metrics log: it is not a regular file.")
    decoded = decoded_file(path, num_bytes)
    if decoded.foreign is not None:
        raise MetricsLogError(f"{path} is not a metrics log: {decoded.foreign}.")
    if decoded.damage is not None:
        raise DamagedMetricsLogError(f"{path} is damaged{decoded.damage}.", decoded.records)
    return decoded.records


def leading_records(path: str | Path) -> list[Record]:
    """The records of a metrics log up to its first damage; [] for a file that is missing or not a metrics log.

    Args:
        path: the file.
    """
    try:
        return decoded_file(Path(path)).records if Path(path).is_file() else []
    except (FileNotFoundError, IsADirectoryError):
        return []


def without_wall_clock(record: Record) -> Record:
    """The record without `WALL_CLOCK_FIELDS`: the part that is identical in an uninterrupted and a resumed run.

    Args:
        record: a record of the metrics log.
    """
    return {key: value for key, value in record.items() if not any(fnmatchcase(key, one) for one in WALL_CLOCK_FIELDS)}


def decoded_file(path: Path, num_bytes: int | None = None) -> Decoded:
    """What the first `num_bytes` bytes of a file hold; all of it if None."""
    try:
        content = form_of(path).array(path.read_bytes()[:num_bytes])
    except MemoryError:
        return Decoded(foreign=f"it is too large to be read ({path.stat().st_size} bytes)")
    return decode(content + (b"" if num_bytes is None else ARRAY.closing))
