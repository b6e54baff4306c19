"""Fills a tracker from the journal of a run, afterwards and completely."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from onstep.journal import Record, read_records
from onstep.sinks.metric_sink import MetricSink, RunIdentity
from onstep.sinks.points import RunPoints

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
        JournalError: when the file is no journal.
    """
    records = read_records(journal_path)
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

    Its id is not the one of the run itself, so that a tracker that has part of the run keeps the two apart.
    """
    folder = Path(journal_path).absolute().parent
    content = run_record(folder)
    run_id = str(content.get("run_id") or path_id(folder))
    config = content.get("config")
    return RunIdentity(
        name=str(content.get("name") or folder.name),
        run_id=f"{run_id}-replay",
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
        metrics = {name: value for name, value in record.items() if name not in _HEAD}
        if not _is_report(metrics):
            continue
        kept, shown = points.add(metrics, int(record.get("global_step", 0)), float(record.get("timestamp", 0.0)))
        point = kept if sink.keeps_names else shown
        if point.metrics:
            sink.log(point.metrics, point.step, point.timestamp)
            num_sent += 1
    return num_sent


def _is_report(metrics: Mapping[str, Any]) -> bool:
    """Whether there is more than the head that every record has."""
    return any(name not in ("epoch", "experiment_info") for name in metrics)
