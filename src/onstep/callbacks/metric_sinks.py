"""Sends what a run reports to trackers; both doors attach it for `logger.report_to`, so its home is `onstep.trackers`."""

from onstep.trackers.trackers_callback import MetricSinks

__all__ = ["MetricSinks"]
