"""Sends what a run reports to trackers; both doors attach it for `logger.report_to`, so its home is `onstep.sinks`."""

from onstep.sinks.metric_sinks import MetricSinks

__all__ = ["MetricSinks"]
