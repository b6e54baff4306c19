"""Fills a tracker from the journal of a run, afterwards and completely."""

from __future__ import annotations

import hashlib
import json
import logging
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from onstep.analysis.logs.run_status import run_record
from onstep.config.reporting import NAMES
from onstep.metrics_log import JournalError, Record, read_records
from onstep.trackers.metric_names import BRIDGE, HF, bridge_names
from onstep.trackers.points import RunPoints
from onstep.trackers.services.tensorboard_tracker import TensorBoardSink
from onstep.trackers.tag_record import BRIDGE_KEY, VS_SAMPLES, TagRow, rows_of
from onstep.trackers.tracker import MetricSink, RunIdentity
from onstep.trackers.tracker_logger import SAMPLES_FOLDER

logger: logging.Logger = logging.getLogger(__name__)

_HEAD = ("timestamp", "global_step")
_STATUSES = ("completed", "stopped", "preempted", "failed")


def replay(
    journal_path: str | Path,
    sink: MetricSink,
    run: RunIdentity | None = None,
    *,
    output: str | Path | None = None,
    names: Sequence[str] = NAMES,
    progress: Callable[[list[Record]], Iterable[Record]] = iter,
) -> int:
    """Send every record of a journal to a tracker, as one fresh run, and wait until all is handed over.

    A last record that is cut short is left out, with a warning.

    Args:
        journal_path: The run's `trainer_logs.json`, finished, crashed or still growing.
        sink: A tracker that is not open; its errors are raised.
        run: What the tracker is told of the run; None is `recorded_run(journal_path, output)`.
        output: Where the sink puts local files; None is the journal's folder.
        names: What the tracker is to show of what the journal has: hf, bridge, or both.
        progress: Wraps the records, as `tqdm` does.

    Returns:
        How many records had numbers and were sent; without Hugging Face's names, how many steps.

    Raises:
        FileNotFoundError: when there is no such journal.
        JournalError: when the file is no journal, or has nothing to send; the tracker is not opened then.
    """
    records = read_records(journal_path)
    if not any(map(_is_report, records)):
        raise JournalError(f"{journal_path} has no metrics to send (records: {len(records)}); nothing was written.")
    if cut := _cut_record(Path(journal_path)):
        step = records[-1].get("global_step", 0)
        logger.warning(
            "%s ends within a record, after step %s. Left out: %d characters, %.60r", journal_path, step, len(cut), cut
        )
    run = run or recorded_run(journal_path, output)
    sinks, tags = [sink], [row for record in records for row in rows_of(record.get(BRIDGE_KEY, {}))]
    if isinstance(sink, TensorBoardSink) and BRIDGE in names and tags:
        sinks.append(sink.beside(SAMPLES_FOLDER))
    status = "failed"
    try:
        for one in sinks:
            one.open(run, {})
        num_sent = _send(progress(records), sinks, names, tags if BRIDGE in names else ())
        status = recorded_status(journal_path)
    finally:
        for one in sinks:
            one.close(status)
    return num_sent


def recorded_run(journal_path: str | Path, output: str | Path | None = None) -> RunIdentity:
    """The run that a journal is of, from the `run.json` beside it where there is one.

    Its id is not the one of the run itself and another each time, so that a tracker that has part of the run, or an
    earlier replay of it, keeps them apart.
    """
    folder = Path(journal_path).absolute().parent
    content = run_record(folder)
    run_id = str(content.get("run_id") or path_id(folder))
    config = content.get("config")
    return RunIdentity(
        name=str(content.get("name") or folder.name),
        run_id=f"{run_id}-replay-{uuid.uuid4().hex[:8]}",
        folder=folder if output is None else Path(output),
        config=config if isinstance(config, dict) else {},
    )


def recorded_status(journal_path: str | Path) -> str:
    """How the run ended, as its `run.json` says; "completed" where it says nothing."""
    status = run_record(Path(journal_path).parent).get("status")
    return status if status in _STATUSES else "completed"


def path_id(folder: Path) -> str:
    """An id for the run of a folder that has none, the same at every start."""
    return hashlib.blake2b(str(folder.absolute()).encode(), digest_size=16).hexdigest()


def _send(records: Iterable[Record], sinks: list[MetricSink], names: Sequence[str], tags: Sequence[TagRow]) -> int:
    """Send the records to the first sink, and before each the tags up to its step, which a later one may hold."""
    points, num_sent, waiting, sink = RunPoints(), 0, deque(tags), sinks[0]
    for record in records:
        if not _is_report(record):
            continue
        metrics = {name: value for name, value in record.items() if name not in _HEAD}
        step = int(record.get("global_step", 0))
        while waiting and waiting[0].step <= step:
            _send_tags(waiting.popleft(), sinks)
        kept, shown = points.add(metrics, step, float(record.get("timestamp", 0.0)))
        point = kept if getattr(sink, "keeps_names", False) else shown
        if point.metrics and HF in names:
            sink.log(point.metrics, point.step, point.timestamp)
            num_sent += 1
    for row in waiting:
        _send_tags(row, sinks)
    return num_sent if HF in names else len(tags)


def _send_tags(row: TagRow, sinks: Sequence[MetricSink]) -> None:
    sinks[0].log(bridge_names(sinks[0].name, row.tags), row.step, row.timestamp)
    for over_samples in sinks[1:] if row.over_samples else ():
        curves = {tag + VS_SAMPLES: row.tags[tag] for tag in row.over_samples}
        over_samples.log(curves, row.samples, row.timestamp)


def _cut_record(path: Path) -> str:
    """What stands of a last record whose writing was interrupted; "" for a journal whose records are whole."""
    text = path.read_text(encoding="utf-8", errors="replace").rstrip(" \t\r\n\x00,")
    last = text.rsplit("\n", 1)[-1]
    if last in ("[", "]"):
        return ""
    try:
        json.loads(last)
    except ValueError:
        return last
    return ""


def _is_report(record: Record) -> bool:
    """Whether there is more than the head that every record has."""
    return any(name not in (*_HEAD, "epoch", "experiment_info") for name in record)
