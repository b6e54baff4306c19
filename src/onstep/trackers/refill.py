"""Fills a tracker from the complete metrics log of a run, after or during training."""

from __future__ import annotations

import hashlib
import logging
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from onstep.analysis.logs.columns import Columns
from onstep.analysis.logs.lines import MAX_LINE_BYTES
from onstep.analysis.logs.reading import read_log
from onstep.analysis.logs.record_file import RecordFile
from onstep.analysis.logs.run_status import run_record
from onstep.config.trackers import NAMES
from onstep.errors import DataError
from onstep.files.bounded_reading import brief
from onstep.record import MetricsLogError, Record
from onstep.record.gaps import MISSING, describe_gap
from onstep.record.history import BRIDGE_KEY, INFO_KEY
from onstep.trackers.metric_names import BRIDGE, HF, bridge_names
from onstep.trackers.points import RunPoints, is_step, numbers_of
from onstep.trackers.services.csv_tracker import CsvTracker
from onstep.trackers.services.tensorboard_tracker import TensorBoardTracker
from onstep.trackers.tag_record import VS_SAMPLES, TagRow, checked_rows
from onstep.trackers.tracker import RunIdentity, Tracker
from onstep.trackers.tracker_logger import SAMPLES_DIR

logger: logging.Logger = logging.getLogger(__name__)

_HEAD = ("timestamp", "global_step", MISSING)
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
        The number of records that were sent; without Hugging Face's names, the number of steps.

    Raises:
        FileNotFoundError: if the metrics log does not exist.
        MetricsLogError: if the file is not a metrics log, has a record whose step, timestamp or tags cannot be sent, or
            has nothing to send; the tracker is not opened in that case.
    """
    records = _read(Path(metrics_log_path))
    tags: list[TagRow] = []
    for number, record in enumerate(records, start=1):
        if _is_report(record):
            tags += _checked_tags(record, names, f"record {number} of {metrics_log_path}")
        if gap := describe_gap(record):
            logger.warning("%s: %s, and the tracker will lack them too", metrics_log_path, gap)
    if not any(map(_is_report, records)):
        raise MetricsLogError(
            f"{metrics_log_path} has no metrics to send (records: {len(records)}); nothing was written."
        )
    run = run or recorded_run(metrics_log_path, output)
    trackers = [tracker]
    if isinstance(tracker, TensorBoardTracker) and tags:
        trackers.append(tracker.beside(SAMPLES_DIR))
    columns = _columns(records) if isinstance(tracker, CsvTracker) else []
    status = "failed"
    try:
        for one in trackers:
            one.open(run, {})
        if isinstance(tracker, CsvTracker):
            tracker.expect(columns)
        num_sent = _send(progress(records), trackers, names, tags)
        status = recorded_status(metrics_log_path)
    finally:
        for one in trackers:
            one.close(status)
    return num_sent


def recorded_run(metrics_log_path: str | Path, output: str | Path | None = None) -> RunIdentity:
    """Identify the run of a metrics log, from the `run.json` next to it if there is one.

    The id is new for each call and differs from the run's own, so a tracker that already has part of the run, or an
    earlier replay, keeps them apart.
    """
    directory = Path(metrics_log_path).absolute().parent
    content = run_record(directory)
    run_id = str(content.get("run_id") or path_id(directory))
    config = content.get("config")
    return RunIdentity(
        name=str(content.get("name") or directory.name),
        run_id=f"{run_id}-replay-{uuid.uuid4().hex[:8]}",
        directory=directory if output is None else Path(output),
        config=config if isinstance(config, dict) else {},
    )


def recorded_status(metrics_log_path: str | Path) -> str:
    """The final status of the run according to its `run.json`; "completed" if unknown."""
    status = run_record(Path(metrics_log_path).parent).get("status")
    return status if status in _STATUSES else "completed"


def path_id(directory: Path) -> str:
    """An id for a run without one, derived from its path and therefore stable."""
    return hashlib.blake2b(str(directory.absolute()).encode(), digest_size=16).hexdigest()


def _send(records: Iterable[Record], trackers: list[Tracker], names: Sequence[str], tags: Sequence[TagRow]) -> int:
    """Send the records to the first tracker; before each, send the tags up to its step, which a later one may hold."""
    points, num_sent, waiting, tracker = RunPoints(), 0, deque(tags), trackers[0]
    for record in records:
        if not _is_report(record):
            continue
        metrics = {name: value for name, value in record.items() if name not in _HEAD}
        step = int(record.get("global_step", 0))
        while waiting and waiting[0].step <= step:
            _send_tags(waiting.popleft(), trackers)
        kept, shown = points.add(metrics, step, float(record.get("timestamp", 0.0)))
        point = kept if getattr(tracker, "keeps_names", False) else shown
        if point.metrics and HF in names:
            tracker.log(point.metrics, point.step, point.timestamp)
            num_sent += 1
    for row in waiting:
        _send_tags(row, trackers)
    return num_sent if HF in names else len(tags)


def _send_tags(row: TagRow, trackers: Sequence[Tracker]) -> None:
    trackers[0].log(bridge_names(trackers[0].name, row.tags), row.step, row.timestamp)
    for over_samples in trackers[1:] if row.over_samples else ():
        curves = {tag + VS_SAMPLES: row.tags[tag] for tag in row.over_samples}
        over_samples.log(curves, row.samples, row.timestamp)


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


def _columns(records: Sequence[Record]) -> list[str]:
    """The names of all metrics, for a table.

    Raises:
        DataError: if almost all of many cells of the table would be empty.
    """
    (records.columns if isinstance(records, RecordFile) else Columns(records)).check_table("the table of the replay")
    names = dict.fromkeys(name for record in records if _is_report(record) for name in numbers_of(record))
    return [name for name in names if name not in (*_HEAD, BRIDGE_KEY)]


def _checked_tags(record: Record, names: Sequence[str], where: str) -> list[TagRow]:
    """The rows of Megatron Bridge's tags to send; refuses a record that no tracker can show."""
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
    if BRIDGE not in names:
        return []
    rows = checked_rows(record.get(BRIDGE_KEY, {}))
    if rows is None:
        raise MetricsLogError(
            f"{where}: {BRIDGE_KEY!r} must have columns of one length: step and samples (integers from 0 to "
            f"2**63 - 1), timestamp (seconds), and tags (numbers by name); remove it, or replay with --names {HF}."
        )
    return rows


def _is_report(record: Record) -> bool:
    """Whether a record contains more than the fields that every record has."""
    return any(name not in (*_HEAD, "epoch", INFO_KEY) for name in record)
