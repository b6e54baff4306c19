"""Writes and reads what happened in a run: append-only files of records, continued at a checkpoint's position.

`writer` is the one writer: it knows the position that checkpoints save, moves what follows it aside after a resume or a
rollback, names what is lost, and keeps what a full disk refuses. `metrics_log` is a file of records, `saved_log` a
position in it, `gaps` the record in place of lost ones.
"""

from onstep.record.metrics_log import (
    WALL_CLOCK_FIELDS,
    DamagedMetricsLogError,
    MetricsLog,
    MetricsLogError,
    MetricsLogHeldError,
    Record,
    align,
    fork,
    leading_records,
    read_records,
    set_aside,
    without_wall_clock,
)

__all__ = [
    "WALL_CLOCK_FIELDS",
    "DamagedMetricsLogError",
    "MetricsLog",
    "MetricsLogError",
    "MetricsLogHeldError",
    "Record",
    "align",
    "fork",
    "leading_records",
    "read_records",
    "set_aside",
    "without_wall_clock",
]
