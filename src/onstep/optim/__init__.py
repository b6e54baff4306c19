"""Optimizers, the finite gate, the loss scaler, and the schedules of learning rate and weight decay."""

from onstep.optim.build import build_loss_scaler, build_optimizer, wrap_optimizer
from onstep.optim.finite_gate import DeviceFiniteGate, FiniteGate, HostFiniteGate, finite_gate
from onstep.optim.loss_scaler import LossScaler
from onstep.optim.muon import MuonWithAdamW
from onstep.optim.optimizer import TrainingOptimizer
from onstep.optim.param_scheduler import OptimizerParamScheduler, ParamScheduler
from onstep.optim.param_schedules import LrSchedule, WdSchedule, learning_rate, weight_decay
from onstep.optim.scheduler_build import build_scheduler
from onstep.optim.torch_scheduler import TorchSchedulerAdapter
from onstep.optim.zero_count import count_zeros

__all__ = [
    "DeviceFiniteGate",
    "FiniteGate",
    "HostFiniteGate",
    "LossScaler",
    "LrSchedule",
    "MuonWithAdamW",
    "OptimizerParamScheduler",
    "ParamScheduler",
    "TorchSchedulerAdapter",
    "TrainingOptimizer",
    "WdSchedule",
    "build_loss_scaler",
    "build_optimizer",
    "build_scheduler",
    "count_zeros",
    "finite_gate",
    "learning_rate",
    "weight_decay",
    "wrap_optimizer",
]
