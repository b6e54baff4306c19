"""Gives the readers and the writer of a metrics log the name that they had before version 0.5."""

from onstep.record import MetricsLog, MetricsLogError, align, read_records

__all__ = ["MetricsLog", "MetricsLogError", "align", "read_records"]
