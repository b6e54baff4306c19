"""Measures training and formats the results: norms (`norms/`), FLOPs, memory, throughput, losses of experts.

Names are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from onstep.lazy_names import lazy_names

if TYPE_CHECKING:
    from onstep.metrics.device_peaks import DevicePeak, peak_of
    from onstep.metrics.flops import MFU_DEFINITION, model_flops_utilization, num_floating_point_operations
    from onstep.metrics.memory_estimate import (
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

_HOMES = {
    "DevicePeak": "onstep.metrics.device_peaks",
    "JsonLogWriter": "onstep.record.writer",
    "MEMORY_KEYS": "onstep.metrics.memory_reports",
    "MFU_DEFINITION": "onstep.metrics.flops",
    "MemoryEstimate": "onstep.metrics.memory_estimate",
    "ModelShape": "onstep.metrics.model_shape",
    "SpectralNorms": "onstep.metrics.norms.spectral_norms",
    "calc_dtensor_params_l2_norm": "onstep.metrics.norms.params_l2_norm",
    "calc_params_l2_norm": "onstep.metrics.norms.params_l2_norm",
    "estimate_training_memory": "onstep.metrics.memory_estimate",
    "format_training_memory_estimate": "onstep.metrics.memory_estimate",
    "logical_and_across_model_parallel_group": "onstep.metrics.reductions",
    "model_flops_utilization": "onstep.metrics.flops",
    "num_floating_point_operations": "onstep.metrics.flops",
    "param_is_not_shared": "onstep.metrics.norms.params_l2_norm",
    "peak_of": "onstep.metrics.device_peaks",
    "reduce_max_memory_across_pp_group": "onstep.metrics.reductions",
    "reduce_max_stat_across_model_parallel_group": "onstep.metrics.reductions",
    "report_l2_norm_grad": "onstep.metrics.norms.parameter_norms",
    "report_memory": "onstep.metrics.memory_reports",
    "report_runtime": "onstep.metrics.throughput",
    "report_theoretical_memory": "onstep.metrics.memory_estimate",
    "report_throughput": "onstep.metrics.throughput",
    "start_memory_history_recording": "onstep.metrics.memory_reports",
}

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

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
