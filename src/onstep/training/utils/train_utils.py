"""Megatron Bridge's import path `training.utils.train_utils`; each name lives in the room of its subject."""

import logging

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
from onstep.training.bridge.interval_sums import training_log
from onstep.training.experts.moe_log import _build_moe_metric_writer as _build_moe_metric_writer
from onstep.training.experts.moe_log import _MoeMetricFanoutWriter as _MoeMetricFanoutWriter
from onstep.training.setup.freezing import _freeze_parameter_if_present as _freeze_parameter_if_present
from onstep.training.setup.freezing import freeze_moe_router
from onstep.training.stages.forward_step import (
    maybe_inject_state,
    needs_global_state_injection,
    prepare_forward_step_func,
)

__all__ = [
    "LinearForLastLayer",
    "MEMORY_KEYS",
    "ModelHook",
    "ModelList",
    "calc_dtensor_params_l2_norm",
    "calc_params_l2_norm",
    "create_value_head_hook",
    "freeze_moe_router",
    "logical_and_across_model_parallel_group",
    "make_value_model",
    "maybe_inject_state",
    "needs_global_state_injection",
    "param_is_not_shared",
    "prepare_forward_step_func",
    "reduce_max_memory_across_pp_group",
    "reduce_max_stat_across_model_parallel_group",
    "report_l2_norm_grad",
    "report_memory",
    "report_runtime",
    "report_throughput",
    "start_memory_history_recording",
    "training_log",
]

logger: logging.Logger = logging.getLogger(__name__)
