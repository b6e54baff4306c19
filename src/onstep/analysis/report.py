"""An interactive report of one run or several, in one HTML file that needs no network."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

from onstep.analysis.comparison import Comparison, compare_runs
from onstep.analysis.comparison_formats import difference_cells, metric_cells, value_text
from onstep.analysis.report_data import report_data
from onstep.analysis.report_page import SCRIPT, STYLE
from onstep.analysis.training_log import TrainingLog
from onstep.errors import DataError, MissingExtraError


def write_report(logs: Sequence[TrainingLog] | TrainingLog, path: str | Path, title: str | None = None) -> Path:
    """Write a page with the summary of the runs, the differences of their configurations, and a chart for each metric.

    The charts can be zoomed, smoothed, and drawn over steps, epochs, time, tokens or operations. The plotly library is
    in the file, about 5 MB; logs of any length add a few megabytes to it. Text from logs and configurations is shown as
    text, and the page's own policy forbids every script but its own and every connection.

    Args:
        logs: The runs, or one run.
        path: The HTML file; its folder is made if needed.
        title: The heading; None: the label of the run, or how many runs there are.

    Returns:
        `path`.

    Raises:
        MissingExtraError: when plotly is not installed.
        ConfigError: a ValueError; when there is no log.
        DataError: a ValueError; when no run has a metric with two values.
    """
    library = _library()
    logs = [logs] if isinstance(logs, TrainingLog) else list(logs)
    comparison = compare_runs(logs)
    data = report_data(logs, comparison.labels)
    if not data["groups"]:
        raise DataError(f"{logs[0].log_path} has no metric with two values to draw; log more steps first.")
    heading = title or (comparison.labels[0] if len(logs) == 1 else f"{len(logs)} runs")
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(_page(heading, comparison, data, library), encoding="utf-8")
    return target


def _library() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise MissingExtraError(
            f"the report needs plotly ({error}); install it by: pip install 'onstep[reports]'"
        ) from error
    return str(get_plotlyjs())


def _page(heading: str, comparison: Comparison, data: dict[str, Any], library: str) -> str:
    scripts = [library, SCRIPT]
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_policy(scripts)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(heading)}</title>",
            f"<style>{STYLE}</style>",
            "</head>",
            "<body>",
            "<main>",
            f"<h1>{escape(heading)}</h1>",
            f'<p class="quiet">Training report, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC</p>',
            _summary(comparison),
            _configuration(comparison),
            _notes(comparison),
            '<section class="controls" id="controls" aria-label="Controls of the charts"></section>',
            '<div id="charts"></div>',
            "<noscript><p>The charts need JavaScript; the tables above do not.</p></noscript>",
            "</main>",
            f'<script type="application/json" id="data">{_json(data)}</script>',
            *(f"<script>{script}</script>" for script in scripts),
            "</body>",
            "</html>",
            "",
        ]
    )


def _policy(scripts: Sequence[str]) -> str:
    """Only these scripts may run, and nothing may be loaded from anywhere."""
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{one}'" for one in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def _json(data: dict[str, Any]) -> str:
    """JSON in which no text can end the script element that it stands in."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _summary(comparison: Comparison) -> str:
    best = {row.name: row.best for row in comparison.metrics}
    head, *rows = metric_cells(comparison)
    body = [
        [
            (cell.removesuffix(" *"), "best" if column - 1 in best.get(row[0], []) else "")
            for column, cell in enumerate(row)
        ]
        for row in rows
    ]
    return f"<section><h2>Summary</h2>{_table(head, body)}</section>"


def _configuration(comparison: Comparison) -> str:
    """What differs; of a single run the whole configuration, folded."""
    if len(comparison.labels) == 1:
        config = comparison.configs[0]
        if config is None:
            return ""
        rows = [[(key, ""), (value_text(value, 200), "")] for key, value in config.items()]
        table = _table(["key", "value"], rows)
        return f"<details><summary><h2>Configuration</h2></summary>{table}</details>"
    head, *rows_ = difference_cells(comparison)
    if not rows_:
        return "<section><h2>Configuration differences</h2><p>None that is known.</p></section>"
    classes = ["" if one.changes_learning else "safe" for one in comparison.differences]
    body = [[(cell, name) for cell in row] for row, name in zip(rows_, classes, strict=True)]
    quiet = '<p class="quiet">Grey: what is learned does not depend on it.</p>' if "safe" in classes else ""
    return f"<section><h2>Configuration differences</h2>{quiet}{_table(head, body)}</section>"


def _notes(comparison: Comparison) -> str:
    items = "".join(f"<li>{escape(note)}</li>" for note in comparison.notes)
    return f"<section><h2>Notes</h2><ul>{items}</ul></section>" if items else ""


def _table(head: Sequence[str], body: Sequence[Sequence[tuple[str, str]]]) -> str:
    """A table of cells, each its text and its class."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    rows = "".join(
        "<tr>" + "".join(f'<td class="{name}">{escape(cell)}</td>' for cell, name in row) + "</tr>" for row in body
    )
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{rows}</tbody></table></div>'
