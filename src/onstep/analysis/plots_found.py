"""The curves that a figure is made of, or why there are none."""

from __future__ import annotations

import difflib

from onstep.analysis.plots_options import PlotOptions
from onstep.analysis.plots_shape import with_x_bounds
from onstep.analysis.series import Curve, curves, metrics_of
from onstep.analysis.training_log import TrainingLog
from onstep.errors import ConfigError, DataError


def found_curves(
    logs: list[TrainingLog], metrics: list[str], options: PlotOptions, need: int | None = None
) -> tuple[list[list[Curve]], PlotOptions]:
    """A row of curves for each metric, and the options with both ends of a bounded x axis.

    Args:
        logs: The runs.
        metrics: What to draw.
        options: What was asked for.
        need: None: some run must have each of the metrics; else one of so many first metrics is enough.
    """
    if not metrics:
        raise ConfigError(f"metrics must name at least one key, got {metrics}.")
    found = curves(logs, metrics, options.x_axis)
    has_any = [any(map(len, row)) for row in found]
    missing = [metric for metric, has in zip(metrics, has_any, strict=True) if not has]
    if need is not None and not any(has_any[:need]):
        raise DataError(_nothing(logs, metrics[:need]))
    if need is None and missing:
        raise DataError(_nothing(logs, missing))
    return found, with_x_bounds(options, [one for row in found for one in row])


def _nothing(logs: list[TrainingLog], metrics: list[str]) -> str:
    """What to say where no run has what was asked for."""
    known = list(dict.fromkeys(name for log in logs for name in metrics_of(log)))
    where = str(logs[0].log_path) if len(logs) == 1 else "none of the logs"
    wanted = " or ".join(map(repr, metrics))
    head = f"{where} has no {wanted}" if len(logs) == 1 else f"{where} has {wanted}"
    if not known:
        return f"{head}, and no other metric yet; log at least one step first."
    near = difflib.get_close_matches(metrics[0], known, 1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"{head}.{hint} There is {', '.join(known)}."
