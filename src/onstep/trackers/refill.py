"""Fills a tracker from the record or the metrics log of a run, after or during training."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from onstep.analysis.logs.columns import Columns
from onstep.analysis.logs.lines import MAX_LINE_BYTES
from onstep.analysis.logs.reading import read_log
from onstep.analysis.logs.record_file import RecordFile
from onstep.analysis.logs.run_status import run_record
from onstep.config import LoggerConfig
from onstep.config.trackers import NAMES
from onstep.errors import DataError
from onstep.files.bounded_reading import brief
from onstep.record import MetricsLogError, Record
from onstep.record.gaps import describe_gap
from onstep.record.history import BRIDGE_KEY, is_reported
from onstep.record.kinds import FILE_NAME
from onstep.trackers.feed import TrackerFeed
from onstep.trackers.lines import Line, RecordLines
from onstep.trackers.metric_names import BRIDGE, HF
from onstep.trackers.numbers import is_step
from onstep.trackers.progress import DIRECTORY, file_name, read_progress
from onstep.trackers.report_to import tracker_options
from onstep.trackers.services.csv_tracker import CsvTracker
from onstep.trackers.tag_record import checked_rows
from onstep.trackers.tracker import RunIdentity, Tracker, path_id

logger: logging.Logger = logging.getLogger(__name__)

_BLOCK = 1000
_STATUSES = ("completed", "stopped", "preempted", "failed")


def replay(
    metrics_log_path: str | Path,
    tracker: Tracker,
    run: RunIdentity | None = None,
    *,
    output: str | Path | None = None,
    names: Sequence[str] = NAMES,
    progress: Callable[[Sequence[Record]], Iterable[Record]] = iter,
) -> int:
    """Send every record of a metrics log to a tracker as a new run, and wait until everything is delivered.

    A truncated last record is skipped with a warning.

    Args:
        metrics_log_path: The `trainer_logs.json` of a finished, crashed or running run.
        tracker: A tracker that is not open; its errors are raised.
        run: Identity of the run in the tracker; None is `recorded_run(metrics_log_path, output)`.
        output: Where the tracker writes local files; None is the metrics log's directory.
        names: Naming schemes to send: hf, bridge, or both.
        progress: Wraps the records, as `tqdm` does.

    Returns:
        The number of records that were sent.

    Raises:
        FileNotFoundError: if the metrics log does not exist.
        MetricsLogError: if the file is not a metrics log, has a record whose step, timestamp or tags cannot be sent, or
            has nothing to send; the tracker is not opened in that case.
    """
    records = _read(Path(metrics_log_path))
    for number, record in enumerate(records, start=1):
        if is_reported(record) or BRIDGE_KEY in record:
            _check(record, names, f"record {number} of {metrics_log_path}")
        if gap := describe_gap(record):
            logger.warning("%s: %s, and the tracker will lack them too", metrics_log_path, gap)
    if not any(map(is_reported, records)):
        raise MetricsLogError(
            f"{metrics_log_path} has no metrics to send (records: {len(records)}); nothing was written."
        )
    if isinstance(tracker, CsvTracker):
        (records.columns if isinstance(records, RecordFile) else Columns(records)).check_table(
            "the table of the replay"
        )
    run = run or recorded_run(metrics_log_path, output)
    feed = TrackerFeed(tracker, names=names)
    return feed.send_now(run, _Once(progress(records)), None, recorded_status(metrics_log_path))


def complete(directory: str | Path, tracker: Tracker, names: Sequence[str] = NAMES) -> int:
    """Send a tracker what it lacks of the record of a run that has ended, as the next start of the run would.

    Args:
        names: Naming schemes of a tracker that has nothing of the run; another one is sent those that it shows.
        directory: the directory of the run.
        tracker: the tracker, which is opened and closed.

    Returns:
        The number of lines that it was sent something of.
    """
    directory = Path(directory)
    record, file = directory / FILE_NAME, directory / DIRECTORY / file_name(tracker.name)
    run_id, known = run_id_of(directory), read_progress(file)
    if known is not None and known.run_id.startswith(run_id):  # Megatron Bridge's tags alone have a suffix
        run_id, names = known.run_id, known.names or names
    run = replace(recorded_run(record), run_id=run_id)
    return TrackerFeed(tracker, names=names).send_now(run, RecordLines(record), file, recorded_status(record))


def recorded_options(directory: Path, name: str) -> dict[str, Any]:
    """The options of a tracker in the configuration of a run, with which it is the same run there.

    Args:
        directory: the directory of the run.
        name: the name of the tracker, as in `report_to`.
    """
    config, known = run_record(directory).get("config"), LoggerConfig()
    sections = config if isinstance(config, dict) else {}
    for key, value in dict(sections.get("logger", {})).items():
        if hasattr(known, key):
            setattr(known, key, value)
    return tracker_options(name, known, dict(sections.get("trainer", {})))


def can_complete(directory: Path, tracker: str) -> bool:
    """Whether the record of a run has all that a tracker lacks: it begins with the run, or has fed it.

    Args:
        directory: the directory of the run.
        tracker: the name of the tracker.
    """
    if (directory / FILE_NAME).is_file() and (directory / DIRECTORY / file_name(tracker)).is_file():
        return True
    first = RecordLines(directory / FILE_NAME).read(Line({}, 0))[:1]
    return [line.data.get("global_step") for line in first] == [0]


class _Once:
    """Records that are read one after the other, and only once."""

    def __init__(self, records: Iterable[Record]) -> None:
        self._records, self._end = iter(records), 0

    def read(self, after: Line) -> list[Line]:
        """The next records."""
        lines = [Line(record, self._end + at) for at, record in enumerate(islice(self._records, _BLOCK), start=1)]
        self._end += len(lines)
        return lines

    def has(self, line: Line) -> bool:
        """Always."""
        return True

    def append(self, data: Record, step: int) -> None:
        """Nothing can be added."""
        raise NotImplementedError


def run_id_of(directory: Path) -> str:
    """The id of the run in a directory."""
    return str(run_record(directory).get("run_id") or path_id(directory))


def recorded_run(metrics_log_path: str | Path, output: str | Path | None = None) -> RunIdentity:
    """Identify the run of a metrics log, from the `run.json` next to it if there is one.

    The id is new for each call and differs from the run's own, so a tracker that already has part of the run, or an
    earlier replay, keeps them apart.

    Args:
        metrics_log_path: the metrics log.
        output: the directory of the run; None for that of the log.
    """
    directory = Path(metrics_log_path).absolute().parent
    content = run_record(directory)
    config = content.get("config")
    return RunIdentity(
        name=str(content.get("name") or directory.name),
        run_id=f"{run_id_of(directory)}-replay-{uuid.uuid4().hex[:8]}",
        directory=directory if output is None else Path(output),
        config=config if isinstance(config, dict) else {},
    )


def recorded_status(metrics_log_path: str | Path) -> str:
    """The final status of the run according to its `run.json`; "completed" if unknown."""
    status = run_record(Path(metrics_log_path).parent).get("status")
    return status if status in _STATUSES else "completed"


def _read(path: Path) -> Sequence[Record]:
    """The records, decoded on access; warns of those that are skipped.

    Raises:
        FileNotFoundError: if the file does not exist.
        MetricsLogError: if the file is not a metrics log, or is damaged before its last record.
    """
    try:
        records, notes = read_log(path)
    except DataError as error:
        raise MetricsLogError(f"{path} is not a metrics log: {error}") from error
    if not isinstance(records, RecordFile):
        for note in notes:
            logger.warning("%s: %s", path, note)
        return records
    damage = records.num_bad_lines - records.is_cut_short
    if damage or records.notes:
        raise MetricsLogError(f"{path} is damaged: {'; '.join([*notes[: damage > 0], *records.notes[:3]])}.")
    if records.is_cut_short and len(records):
        cut, step = records.bad_lines[-1].text.decode("utf-8", errors="replace"), records[-1].get("global_step", 0)
        logger.warning("%s ends within a record, after step %s. Skipped: %.60r", path, step, cut)
    if records.num_long_lines:
        logger.warning("%s: %d lines of more than %d bytes are skipped", path, records.num_long_lines, MAX_LINE_BYTES)
    return records


def _check(record: Record, names: Sequence[str], where: str) -> None:
    """Refuse a record that no tracker can show."""
    step, timestamp = record.get("global_step", 0), record.get("timestamp", 0.0)
    if not is_step(int(step) if isinstance(step, float) and step.is_integer() else step):
        raise MetricsLogError(
            f"{where}: global_step is {brief(step)}, which must be an integer from 0 to 2**63 - 1; correct or remove "
            f"the record."
        )
    if not isinstance(timestamp, (int, float)) or not abs(timestamp) < 2**53:
        raise MetricsLogError(
            f"{where}: timestamp is {brief(timestamp)}, which must be a finite number of seconds; correct or remove it."
        )
    if BRIDGE in names and checked_rows(record.get(BRIDGE_KEY, {})) is None:
        raise MetricsLogError(
            f"{where}: {BRIDGE_KEY!r} must have columns of one length: step and samples (integers from 0 to "
            f"2**63 - 1), timestamp (seconds), and tags (numbers by name); remove it, or replay with --names {HF}."
        )
