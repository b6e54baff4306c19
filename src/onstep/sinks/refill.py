"""Fills a tracker from the journal of a run, afterwards and completely."""

from __future__ import annotations

import hashlib
import json
import logging
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from onstep.journal import JournalError, Record, read_records
from onstep.sinks.metric_sink import MetricSink, RunIdentity
from onstep.sinks.points import RunPoints

logger: logging.Logger = logging.getLogger(__name__)

_HEAD = ("timestamp", "global_step")
_STATUSES = ("completed", "stopped", "preempted", "failed")


def replay(
    journal_path: str | Path,
    sink: MetricSink,
    run: RunIdentity | None = None,
    *,
    output: str | Path | None = None,
    progress: Callable[[list[Record]], Iterable[Record]] = iter,
) -> int:
    """Send every record of a journal to a tracker, as one fresh run, and wait until all is handed over.

    A last record that is cut short is left out, with a warning.

    Args:
        journal_path: The run's `trainer_logs.json`, finished, crashed or still growing.
        sink: A tracker that is not open; its errors are raised.
        run: What the tracker is told of the run; None is `recorded_run(journal_path, output)`.
        output: Where the sink puts local files; None is the journal's folder.
        progress: Wraps the records, as `tqdm` does.

    Returns:
        How many records had numbers and were sent.

    Raises:
        FileNotFoundError: when there is no such journal.
        JournalError: when the file is no journal, or has nothing to send; the tracker is not opened then.
    """
    records = read_records(journal_path)
    if not any(_is_report(_metrics(record)) for record in records):
        raise JournalError(f"{journal_path} has no metrics to send (records: {len(records)}); nothing was written.")
    if cut := _cut_record(Path(journal_path)):
        step = records[-1].get("global_step", 0)
        logger.warning(
            "%s ends within a record, after step %s. Left out: %d characters, %.60r", journal_path, step, len(cut), cut
        )
    sink.open(run or recorded_run(journal_path, output), {})
    status = "failed"
    try:
        num_sent = _send(progress(records), sink)
        status = recorded_status(journal_path)
    finally:
        sink.close(status)
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


def run_record(folder: Path) -> dict[str, Any]:
    """The content of the `run.json` in `folder`; {} where there is none that can be read."""
    try:
        content = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def path_id(folder: Path) -> str:
    """An id for the run of a folder that has none, the same at every start."""
    return hashlib.blake2b(str(folder.absolute()).encode(), digest_size=16).hexdigest()


def _send(records: Iterable[Record], sink: MetricSink) -> int:
    points, num_sent = RunPoints(), 0
    for record in records:
        metrics = _metrics(record)
        if not _is_report(metrics):
            continue
        kept, shown = points.add(metrics, int(record.get("global_step", 0)), float(record.get("timestamp", 0.0)))
        point = kept if getattr(sink, "keeps_names", False) else shown
        if point.metrics:
            sink.log(point.metrics, point.step, point.timestamp)
            num_sent += 1
    return num_sent


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


def _metrics(record: Record) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in _HEAD}


def _is_report(metrics: Mapping[str, Any]) -> bool:
    """Whether there is more than the head that every record has."""
    return any(name not in ("epoch", "experiment_info") for name in metrics)
