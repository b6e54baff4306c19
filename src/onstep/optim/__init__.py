"""Optimizers, the finite gate, the loss scaler, and the schedules of learning rate and weight decay.

`build` creates them from a configuration; `TrainingOptimizer` (`optimizer`) is what the loop steps.
"""

from onstep.optim.build import (
    as_step_optimizer,
    build_optimizer,
    build_scheduler,
    build_torch_optimizer,
    wrap_configured,
    wrap_optimizer,
)
from onstep.optim.finite_gate import DeviceFiniteGate, FiniteGate, HostFiniteGate, finite_gate
from onstep.optim.gradients import clip_grad_norm
from onstep.optim.loss_scaler import LossScaler, build_loss_scaler
from onstep.optim.low_precision import LowPrecisionOptimizer
from onstep.optim.megatron_optimizer import ForeignOptimizer, MegatronOptimizer
from onstep.optim.muon import MuonWithAdamW
from onstep.optim.optimizer import TrainingOptimizer, check_closure, check_scalable
from onstep.optim.param_scheduler import OptimizerParamScheduler
from onstep.optim.protocol import ParamScheduler, RecallsRates, ScalesRates, StepOptimizer
from onstep.optim.schedules import LrSchedule, WdSchedule, learning_rate, weight_decay
from onstep.optim.torch_scheduler import (
    MetricSchedulerAdapter,
    TorchSchedulerAdapter,
    check_length,
    check_scheduler,
    follows_metric,
)
from onstep.optim.zero_counts import count_zeros

__all__ = [
    "DeviceFiniteGate",
    "FiniteGate",
    "ForeignOptimizer",
    "HostFiniteGate",
    "LossScaler",
    "LowPrecisionOptimizer",
    "LrSchedule",
    "MegatronOptimizer",
    "MetricSchedulerAdapter",
    "MuonWithAdamW",
    "OptimizerParamScheduler",
    "ParamScheduler",
    "RecallsRates",
    "ScalesRates",
    "StepOptimizer",
    "TorchSchedulerAdapter",
    "TrainingOptimizer",
    "WdSchedule",
    "as_step_optimizer",
    "build_loss_scaler",
    "build_optimizer",
    "build_scheduler",
    "build_torch_optimizer",
    "check_length",
    "check_closure",
    "check_scalable",
    "check_scheduler",
    "clip_grad_norm",
    "count_zeros",
    "finite_gate",
    "follows_metric",
    "learning_rate",
    "weight_decay",
    "wrap_configured",
    "wrap_optimizer",
]
