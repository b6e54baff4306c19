"""The training layer: one loop, the functional door and everything that the loop calls."""

from onstep.events import CallbackContext, CallbackManager
from onstep.metrics.flops import MFU_DEFINITION, model_flops_utilization, num_floating_point_operations
from onstep.metrics.memory_estimate import (
    MemoryEstimate,
    estimate_training_memory,
    format_training_memory_estimate,
    report_theoretical_memory,
)
from onstep.metrics.memory_reports import MEMORY_KEYS, report_memory, start_memory_history_recording
from onstep.metrics.norms.parameter_norms import report_l2_norm_grad
from onstep.metrics.norms.params_l2_norm import calc_dtensor_params_l2_norm, calc_params_l2_norm, param_is_not_shared
from onstep.metrics.reductions import (
    logical_and_across_model_parallel_group,
    reduce_max_memory_across_pp_group,
    reduce_max_stat_across_model_parallel_group,
)
from onstep.metrics.throughput import report_runtime, report_throughput
from onstep.models.heads import LinearForLastLayer, ModelHook, ModelList, create_value_head_hook, make_value_model
from onstep.models.heads import _ensure_model_list as _ensure_model_list
from onstep.models.heads import _register_linear_for_last_layer_mapping as _register_linear_for_last_layer_mapping
from onstep.progress import TrainState
from onstep.training.bridge.global_state import GlobalState, TrainStepResult
from onstep.training.bridge.housekeeping import _finish_train as _finish_train
from onstep.training.bridge.housekeeping import (
    evaluate,
    evaluate_and_print_results,
    maybe_check_weight_hash_across_dp_replicas,
    maybe_report_stragglers,
    maybe_run_manual_gc,
    maybe_synchronize_training_step,
    post_training_step_callbacks,
)
from onstep.training.bridge.model_parallel import _handle_mxfp8_param_buffer_copy as _handle_mxfp8_param_buffer_copy
from onstep.training.bridge.model_parallel import (
    disable_forward_pre_hook,
    enable_forward_pre_hook,
    should_disable_forward_pre_hook,
)
from onstep.training.bridge.training_log import training_log
from onstep.training.compute.losses import LossShare, MeanLoss
from onstep.training.experts.moe_log import _build_moe_metric_writer as _build_moe_metric_writer
from onstep.training.experts.moe_log import _MoeMetricFanoutWriter as _MoeMetricFanoutWriter
from onstep.training.fault_tolerance.sections import FaultToleranceState
from onstep.training.pretrain import finetune, pretrain
from onstep.training.profiling.profilers import handle_profiling_step, handle_profiling_stop, should_profile_rank
from onstep.training.reporting.gpu_telemetry import EnergyMonitor
from onstep.training.reporting.timers import Clock, Timer, Timers
from onstep.training.rerun.machine import RerunStateMachine
from onstep.training.rerun.snapshot import RerunDataIterator
from onstep.training.runs.microbatches import (
    NumMicroBatchesCalculator,
    destroy_num_microbatches_calculator,
    get_current_global_batch_size,
    get_current_running_global_batch_size,
    get_micro_batch_size,
    get_num_microbatches,
    init_num_microbatches_calculator,
    reconfigure_num_microbatches_calculator,
    unset_num_microbatches_calculator,
    update_num_microbatches,
)
from onstep.training.runs.signals import DistributedSignalHandler, Preempted
from onstep.training.setup.freezing import _freeze_parameter_if_present as _freeze_parameter_if_present
from onstep.training.setup.freezing import freeze_moe_router
from onstep.training.stages.exits import checkpoint_and_decide_exit, save_checkpoint_and_time
from onstep.training.stages.forward_step import (
    forward_step,
    maybe_inject_state,
    needs_global_state_injection,
    prepare_forward_step_func,
)
from onstep.training.stages.progress_log import (
    compute_throughputs_and_append_to_progress_log,
    get_start_time_from_progress_log,
)
from onstep.training.stragglers.detector import StragglerDetector
from onstep.training.stragglers.nvrx import (
    NVRxStragglerDetectionManager,
    check_nvrx_straggler_detection,
    safe_shutdown_nvrx_straggler_manager,
)
from onstep.training.train import train, train_step
from onstep.training.verification.weight_hash import check_param_hashes_across_dp_replicas, weight_hashes

__all__ = [
    "MEMORY_KEYS",
    "MFU_DEFINITION",
    "CallbackContext",
    "CallbackManager",
    "Clock",
    "DistributedSignalHandler",
    "EnergyMonitor",
    "FaultToleranceState",
    "GlobalState",
    "LinearForLastLayer",
    "LossShare",
    "MeanLoss",
    "MemoryEstimate",
    "ModelHook",
    "ModelList",
    "NVRxStragglerDetectionManager",
    "NumMicroBatchesCalculator",
    "Preempted",
    "RerunDataIterator",
    "RerunStateMachine",
    "StragglerDetector",
    "Timer",
    "Timers",
    "TrainState",
    "TrainStepResult",
    "calc_dtensor_params_l2_norm",
    "calc_params_l2_norm",
    "check_nvrx_straggler_detection",
    "check_param_hashes_across_dp_replicas",
    "checkpoint_and_decide_exit",
    "compute_throughputs_and_append_to_progress_log",
    "create_value_head_hook",
    "destroy_num_microbatches_calculator",
    "disable_forward_pre_hook",
    "enable_forward_pre_hook",
    "estimate_training_memory",
    "evaluate",
    "evaluate_and_print_results",
    "finetune",
    "format_training_memory_estimate",
    "forward_step",
    "freeze_moe_router",
    "get_current_global_batch_size",
    "get_current_running_global_batch_size",
    "get_micro_batch_size",
    "get_num_microbatches",
    "get_start_time_from_progress_log",
    "handle_profiling_step",
    "handle_profiling_stop",
    "init_num_microbatches_calculator",
    "logical_and_across_model_parallel_group",
    "make_value_model",
    "maybe_check_weight_hash_across_dp_replicas",
    "maybe_inject_state",
    "maybe_report_stragglers",
    "maybe_run_manual_gc",
    "maybe_synchronize_training_step",
    "model_flops_utilization",
    "needs_global_state_injection",
    "num_floating_point_operations",
    "param_is_not_shared",
    "post_training_step_callbacks",
    "prepare_forward_step_func",
    "pretrain",
    "reconfigure_num_microbatches_calculator",
    "reduce_max_memory_across_pp_group",
    "reduce_max_stat_across_model_parallel_group",
    "report_l2_norm_grad",
    "report_memory",
    "report_runtime",
    "report_theoretical_memory",
    "report_throughput",
    "safe_shutdown_nvrx_straggler_manager",
    "save_checkpoint_and_time",
    "should_disable_forward_pre_hook",
    "should_profile_rank",
    "start_memory_history_recording",
    "train",
    "train_step",
    "training_log",
    "unset_num_microbatches_calculator",
    "update_num_microbatches",
    "weight_hashes",
]
