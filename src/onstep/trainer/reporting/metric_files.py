"""Formats the metrics of a training or evaluation for people, and writes them as JSON files."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

from onstep.record.kinds import Metrics


def formatted(metrics: Metrics) -> dict[str, object]:
    """Metrics as people read them: bytes in MB, seconds as h:mm:ss, `total_flos` in units of 2**30, four decimals."""
    return {name: _formatted(name, value) for name, value in metrics.items()}


def lines(split: str, metrics: Metrics) -> list[str]:
    """A heading and a line per metric, sorted by name."""
    shown = formatted(metrics)
    names, values = (max((len(str(one)) for one in column), default=0) for column in (shown, shown.values()))
    heading = f"***** {split} metrics *****"
    return [heading, *(f"  {name: <{names}} = {shown[name]!s:>{values}}" for name in sorted(shown))]


def write_metrics(directory: Path, split: str, metrics: Metrics, *, combined: bool) -> None:
    """Write `<split>_results.json` and, if `combined`, add the metrics to those in `all_results.json`."""
    directory.mkdir(parents=True, exist_ok=True)
    _write(directory / f"{split}_results.json", metrics)
    if combined:
        together = directory / "all_results.json"
        known = json.loads(together.read_text(encoding="utf-8")) if together.exists() else {}
        _write(together, {**known, **metrics})


def _formatted(name: str, value: object) -> object:
    if not isinstance(value, (int, float)):
        return value
    if "_mem_" in name:
        return f"{int(value) >> 20}MB"
    if "_runtime" in name:
        hundredths = int(abs(value - int(value)) * 100)
        return f"{datetime.timedelta(seconds=int(value))}.{hundredths:02d}"
    if name == "total_flos":
        return f"{int(value) >> 30}GF"
    return round(value, 4) if isinstance(value, float) else value


def _write(path: Path, metrics: Metrics) -> None:
    path.write_text(json.dumps(metrics, indent=4, sort_keys=True, default=_plain), encoding="utf-8")


def _plain(value: object) -> object:
    """A NumPy or torch value as Python numbers."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a metric is a {type(value).__name__}, which JSON cannot represent; pass numbers and text")
