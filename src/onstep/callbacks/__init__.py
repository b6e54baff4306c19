"""The built-in callbacks. Each uses nothing but what it is told, so a copy of its file works as well."""

from onstep.callbacks.default_metrics import DefaultMetrics
from onstep.callbacks.info_callback import InfoCallback
from onstep.callbacks.json_logger import JsonLogger
from onstep.callbacks.progress_callback import ProgressCallback
from onstep.metrics.columns import ColumnSpec, MetricSpec, default_final_metrics, default_step_columns

__all__ = [
    "ColumnSpec",
    "DefaultMetrics",
    "InfoCallback",
    "JsonLogger",
    "MetricSpec",
    "ProgressCallback",
    "default_final_metrics",
    "default_step_columns",
]
