"""The training layer: one loop, the functional door and everything that the loop calls."""

from onstep.events import CallbackContext, CallbackManager
from onstep.metrics.flops import MFU_DEFINITION, model_flops_utilization, num_floating_point_operations
from onstep.metrics.memory import MEMORY_KEYS, report_memory
from onstep.metrics.memory_estimate import (
    MemoryEstimate,
    estimate_training_memory,
    format_training_memory_estimate,
    report_theoretical_memory,
)
from onstep.metrics.memory_history import start_memory_history_recording
from onstep.metrics.parameter_norms import report_l2_norm_grad
from onstep.metrics.reductions import reduce_max_memory_across_pp_group
from onstep.metrics.runtime import report_runtime
from onstep.metrics.throughput import report_throughput
from onstep.progress import TrainState
from onstep.training.bridge_log import training_log
from onstep.training.clock import Clock
from onstep.training.evaluation import evaluate, evaluate_and_print_results
from onstep.training.exits import checkpoint_and_decide_exit, save_checkpoint_and_time
from onstep.training.forward_step import (
    forward_step,
    maybe_inject_state,
    needs_global_state_injection,
    prepare_forward_step_func,
)
from onstep.training.losses import LossShare, MeanLoss
from onstep.training.pretrain import pretrain
from onstep.training.progress_log import (
    compute_throughputs_and_append_to_progress_log,
    get_start_time_from_progress_log,
)
from onstep.training.rerun import RerunStateMachine
from onstep.training.rerun_data_iterator import RerunDataIterator
from onstep.training.signals import DistributedSignalHandler, Preempted
from onstep.training.state import GlobalState
from onstep.training.step import TrainStepResult, train_step
from onstep.training.train import train

__all__ = [
    "MEMORY_KEYS",
    "MFU_DEFINITION",
    "CallbackContext",
    "CallbackManager",
    "Clock",
    "DistributedSignalHandler",
    "GlobalState",
    "LossShare",
    "MeanLoss",
    "MemoryEstimate",
    "Preempted",
    "RerunDataIterator",
    "RerunStateMachine",
    "TrainState",
    "TrainStepResult",
    "checkpoint_and_decide_exit",
    "compute_throughputs_and_append_to_progress_log",
    "estimate_training_memory",
    "evaluate",
    "evaluate_and_print_results",
    "format_training_memory_estimate",
    "forward_step",
    "get_start_time_from_progress_log",
    "maybe_inject_state",
    "model_flops_utilization",
    "needs_global_state_injection",
    "num_floating_point_operations",
    "prepare_forward_step_func",
    "pretrain",
    "reduce_max_memory_across_pp_group",
    "report_l2_norm_grad",
    "report_memory",
    "report_runtime",
    "report_theoretical_memory",
    "report_throughput",
    "save_checkpoint_and_time",
    "start_memory_history_recording",
    "train",
    "train_step",
    "training_log",
]
