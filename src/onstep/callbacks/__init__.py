"""Built-in callbacks. They use only what any callback receives, so you can copy one and adapt it."""

from onstep.callbacks.diloco_callback import DiLoCoCallback
from onstep.callbacks.divergence_detector import (
    DivergenceDetector,
    DualTimeScaleDivergenceDetector,
    DualWindowDivergenceDetector,
)
from onstep.callbacks.early_stopping import EarlyStopping, EarlyStoppingCallback
from onstep.callbacks.grad_norm_logger import GradNormLogger
from onstep.callbacks.json_logger import JsonLogger
from onstep.callbacks.learning_rate_monitor import LearningRateMonitor
from onstep.callbacks.lm_eval_callback import LmEvalCallback
from onstep.callbacks.parameter_norm_logger import ParameterNormLogger, WeightNormLogger
from onstep.callbacks.peak_memory import PeakMemory, TraceMalloc
from onstep.callbacks.profiler_callback import ProfilerCallback
from onstep.callbacks.resumable_summary_writer import ResumableSummaryWriter
from onstep.callbacks.router_monitor import CountsRouting, RouterMonitor
from onstep.callbacks.tb_logger import TBLogger, TBScalar, default_tb_scalars
from onstep.callbacks.textgen_callback import TextgenCallback
from onstep.callbacks.throughput_monitor import DefaultMetrics, ThroughputMonitor
from onstep.callbacks.weight_average import EMA, WeightAverage
from onstep.console import InfoCallback, PrinterCallback, ProgressCallback
from onstep.console.table import ColumnSpec, MetricSpec, default_final_metrics, default_step_columns
from onstep.trackers.trackers_callback import TrackersCallback
from onstep.training.serving.trainer_control_callback import TrainerControlCallback, add_control

__all__ = [
    "ColumnSpec",
    "CountsRouting",
    "DefaultMetrics",
    "DiLoCoCallback",
    "DivergenceDetector",
    "DualTimeScaleDivergenceDetector",
    "DualWindowDivergenceDetector",
    "EMA",
    "EarlyStopping",
    "EarlyStoppingCallback",
    "GradNormLogger",
    "InfoCallback",
    "JsonLogger",
    "LearningRateMonitor",
    "LmEvalCallback",
    "TrackersCallback",
    "MetricSpec",
    "ParameterNormLogger",
    "PeakMemory",
    "PrinterCallback",
    "ProfilerCallback",
    "ProgressCallback",
    "ResumableSummaryWriter",
    "RouterMonitor",
    "TBLogger",
    "TBScalar",
    "TextgenCallback",
    "ThroughputMonitor",
    "TraceMalloc",
    "TrainerControlCallback",
    "WeightAverage",
    "WeightNormLogger",
    "add_control",
    "default_final_metrics",
    "default_step_columns",
    "default_tb_scalars",
]
