"""Writes and reads what happened in a run: append-only files of records, continued at a checkpoint's position.

`writer` is the one writer: it knows the position that checkpoints save, moves what follows it aside after a resume or a
rollback, names what is lost, and keeps what a full disk refuses. `metrics_log` is a file of records open for appending;
`reading` and `cutting` work on a closed one; `saved_log` is a position in it, `gaps` the record in place of lost ones.
"""

from onstep.record.cutting import MetricsLogHeldError, align, fork, set_aside
from onstep.record.metrics_log import MetricsLog
from onstep.record.reading import (
    WALL_CLOCK_FIELDS,
    DamagedMetricsLogError,
    MetricsLogError,
    Record,
    leading_records,
    read_records,
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
