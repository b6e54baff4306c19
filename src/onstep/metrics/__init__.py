"""Measures training and formats the results: norms (`norms/`), FLOPs, memory, throughput, losses of experts.

Names are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from onstep.lazy_names import lazy_names

if TYPE_CHECKING:
    from onstep.metrics.device_peaks import DevicePeak, peak_of
    from onstep.metrics.flops import MFU_DEFINITION, model_flops_utilization, num_floating_point_operations
    from onstep.metrics.memory.estimate import (
        MemoryEstimate,
        estimate_training_memory,
        format_training_memory_estimate,
        report_theoretical_memory,
    )
    from onstep.metrics.memory_reports import MEMORY_KEYS, report_memory, start_memory_history_recording
    from onstep.metrics.model_shape import ModelShape
    from onstep.metrics.norms.parameter_norms import report_l2_norm_grad
    from onstep.metrics.norms.params_l2_norm import (
        calc_dtensor_params_l2_norm,
        calc_params_l2_norm,
        param_is_not_shared,
    )
    from onstep.metrics.norms.spectral_norms import SpectralNorms
    from onstep.metrics.reductions import (
        logical_and_across_model_parallel_group,
        reduce_max_memory_across_pp_group,
        reduce_max_stat_across_model_parallel_group,
    )
    from onstep.metrics.throughput import report_runtime, report_throughput
    from onstep.record.writer import JsonLogWriter

__all__ = [
    "DevicePeak",
    "JsonLogWriter",
    "MEMORY_KEYS",
    "MFU_DEFINITION",
    "MemoryEstimate",
    "ModelShape",
    "SpectralNorms",
    "calc_dtensor_params_l2_norm",
    "calc_params_l2_norm",
    "estimate_training_memory",
    "format_training_memory_estimate",
    "logical_and_across_model_parallel_group",
    "model_flops_utilization",
    "num_floating_point_operations",
    "param_is_not_shared",
    "peak_of",
    "reduce_max_memory_across_pp_group",
    "reduce_max_stat_across_model_parallel_group",
    "report_l2_norm_grad",
    "report_memory",
    "report_runtime",
    "report_theoretical_memory",
    "report_throughput",
    "start_memory_history_recording",
]

__getattr__, __dir__ = lazy_names(__name__)
