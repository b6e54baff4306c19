"""The sections of a configuration, a dataclass each; every field is declared by `onstep.config.section.option`.

A new key is one field here: validation, conversion, classes of changes, `onstep config` and the documentation follow.
"""

from onstep.config.sections.anomaly import AnomalyConfig, RerunStateMachineConfig
from onstep.config.sections.checkpoint import CheckpointConfig
from onstep.config.sections.data import DatasetConfig, RNGConfig, TokenizerConfig
from onstep.config.sections.fault_tolerance import (
    FaultToleranceConfig,
    NVRxStragglerDetectionConfig,
    StragglerDetectionConfig,
)
from onstep.config.sections.logger import LoggerConfig
from onstep.config.sections.model import ModelConfig, default_ffn_hidden_size
from onstep.config.sections.optimizer import OptimizerConfig, SchedulerConfig
from onstep.config.sections.peft import PeftConfig
from onstep.config.sections.profiling import ProfilingConfig
from onstep.config.sections.run import DistributedDataParallelConfig, DistributedInitConfig, RunConfig
from onstep.config.sections.training import TrainingConfig, ValidationConfig

__all__ = [
    "AnomalyConfig",
    "CheckpointConfig",
    "DatasetConfig",
    "DistributedDataParallelConfig",
    "DistributedInitConfig",
    "FaultToleranceConfig",
    "LoggerConfig",
    "ModelConfig",
    "NVRxStragglerDetectionConfig",
    "OptimizerConfig",
    "PeftConfig",
    "ProfilingConfig",
    "RNGConfig",
    "RerunStateMachineConfig",
    "RunConfig",
    "SchedulerConfig",
    "StragglerDetectionConfig",
    "TokenizerConfig",
    "TrainingConfig",
    "ValidationConfig",
    "default_ffn_hidden_size",
]
