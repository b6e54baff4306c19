"""Writes the newest metrics of jobs in Prometheus' text format, version 0.0.4."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_NOT_SHOWN = frozenset({"timestamp"})
_INVALID = re.compile(r"[^a-zA-Z0-9_]")


def prometheus_text(jobs: Iterable[tuple[str, Mapping[str, Any], Mapping[str, Any]]]) -> str:
    """The metrics of jobs.

    Args:
        jobs: of each its id, its newest metrics and its status.
    """
    lines: dict[str, list[str]] = {}
    for job_id, latest, status in jobs:
        for name, value in _metrics(latest, status).items():
            rows = lines.setdefault(f"onstep_{_INVALID.sub('_', name)}", [])
            rows += _rows(value, f'job_id="{_escaped(job_id)}"')
    shown = {name: rows for name, rows in lines.items() if rows}
    return "".join(f"# TYPE {name} gauge\n" + "".join(f"{name}{row}\n" for row in rows) for name, rows in shown.items())


def _metrics(latest: Mapping[str, Any], status: Mapping[str, Any]) -> dict[str, Any]:
    record = {name: value for name, value in latest.items() if name not in _NOT_SHOWN}
    step = status.get("global_step", latest.get("step", latest.get("global_step")))
    state = status.get("status")
    fixed = {"up": int(state != "ended"), "paused": int(state == "paused"), "step": step}
    record.pop("global_step", None)
    return {**record, **fixed}


def _rows(value: Any, labels: str) -> list[str]:
    if isinstance(value, (list, tuple)):
        return [
            row for rank, one in enumerate(value) if _is_number(one) for row in _rows(one, f'{labels},rank="{rank}"')
        ]
    return [f"{{{labels}}} {_shown(value)}"] if _is_number(value) else []


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if math.isnan(number):
        return "NaN"
    if math.isinf(number):
        return "+Inf" if number > 0 else "-Inf"
    return repr(number)


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
