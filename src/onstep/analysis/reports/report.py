"""Writes an interactive report of one or more runs as a self-contained HTML file."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any, TypeVar

from onstep.analysis.logs import decisions_log, samples_log, task_results
from onstep.analysis.logs.run_status import run_record
from onstep.analysis.logs.training_log import TrainingLog
from onstep.analysis.reports import sections
from onstep.analysis.reports.charts_data import MOST_CHARTS, report_data
from onstep.analysis.reports.comparison import Comparison, compare_runs
from onstep.analysis.reports.ledger import time_ledger
from onstep.analysis.reports.summary import as_number
from onstep.errors import ConfigError, DataError

T = TypeVar("T")


def _asset(name: str) -> str:
    return files("onstep.analysis.reports").joinpath("page", name).read_text("utf-8")


STYLE, SCRIPT, _PAGE = _asset("report.css"), _asset("chart.js") + _asset("report.js"), _asset("report.html")


def write_report(
    logs: Sequence[TrainingLog] | TrainingLog, path: str | Path, title: str | None = None, further: str = ""
) -> Path:
    """Write a page with a summary of the runs, the differences of their configurations, and a chart for each metric.

    It also shows, if the run's directory has them, text samples, decisions with their reasons, where the time went, and
    machine, versions and code revision. Charts can be zoomed, smoothed, and drawn over steps, epochs, time, tokens or
    operations. The file is self-contained and below 1 MB for ten runs of any length. Text from logs and configurations
    is escaped, and the page's content security policy blocks foreign scripts and all connections.

    Args:
        logs: The runs, or a single run.
        path: The HTML file; its directory is created if needed.
        title: The heading; None: the label of the run, or the number of runs.
        further: HTML of sections that follow the summary, such as a step of the past.

    Returns:
        `path`.

    Raises:
        ConfigError: a ValueError; if there are no logs.
        DataError: a ValueError; if no run has a metric with two values.
    """
    logs = [logs] if isinstance(logs, TrainingLog) else list(logs)
    if not logs:
        raise ConfigError("there is no log to report on; pass at least one.")
    comparison = compare_runs(logs)
    data = report_data(logs, comparison.labels)
    if not data["groups"]:
        raise DataError(f"{logs[0].log_path} has no metric with two values to plot; log more steps first.")
    heading = title or (comparison.labels[0] if len(logs) == 1 else f"{len(logs)} runs")
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(_page(heading, logs, comparison, data, further), encoding="utf-8", errors="replace")
    return target


def _page(heading: str, logs: Sequence[TrainingLog], comparison: Comparison, data: dict[str, Any], further: str) -> str:
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = (  # only this script may run, and nothing may be loaded
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; base-uri 'none'; "
        "form-action 'none'"
    )
    content = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for letter in "&<>":  # so that no text can end its script element
        content = content.replace(letter, f"\\u{ord(letter):04x}")
    return Template(_PAGE).substitute(
        policy=policy,
        heading=escape(heading),
        style=STYLE,
        date=f"{datetime.now(UTC):%Y-%m-%d %H:%M}",
        summary=sections.summary(comparison) + further + sections.configuration(comparison),
        details=_details(logs, comparison, data["left_out"]),
        data=content,
        script=SCRIPT,
    )


def _details(logs: Sequence[TrainingLog], comparison: Comparison, left_out: int) -> str:
    """What is read from the directories of the runs, and the notes."""
    labels, places, remarks = comparison.labels, [log.log_path.parent for log in logs], list(comparison.notes)
    if left_out:
        remarks.append(
            f"{left_out:,} metrics beyond the first {MOST_CHARTS:,} have no chart; use onstep logs plot --metrics"
        )
    records = [run_record(place) for place in places]
    decided = [_readable(decisions_log.read_decisions, place / decisions_log.FILE_NAME, remarks) for place in places]
    ledgers = [
        time_ledger(log, as_number(record.get("continued_at")), [as_number(one.get("timestamp")) for one in decisions])
        for log, record, decisions in zip(logs, records, decided, strict=True)
    ]
    written = [_readable(samples_log.samples_of_run, place, remarks) for place in places]
    evaluated = [_readable(task_results.evaluations_of_run, place, remarks) for place in places]
    parts = (
        sections.tasks(labels, evaluated),
        sections.samples(labels, written),
        sections.time(labels, ledgers),
        sections.decisions(labels, decided),
        sections.machines(labels, records),
        sections.notes(remarks),
    )
    return "\n".join(filter(None, parts))


def _readable(read: Callable[[Path], Iterable[T]], path: Path, remarks: list[str]) -> list[T]:
    """What is in a file; nothing, and a remark, if it cannot be read."""
    try:
        return list(read(path))
    except OSError as error:
        remarks.append(f"{path} cannot be read: {error.strerror or error}")
        return []
