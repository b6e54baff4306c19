"""The configuration of a run: dataclasses, YAML, `a.b=c` overrides and `TrainingArguments`."""

from onstep.config.conversion import args_to_config, config_to_args
from onstep.config.differences import ABSENT, Change, changes, classify, decide, describe, meaning
from onstep.config.keys import diff, nearest_key, to_flat
from onstep.config.lengths import steps_of_epochs, steps_per_epoch, train_iters
from onstep.config.load import apply_overrides, dump_yaml, from_dict, load_yaml, merge, parse_yaml, save_yaml
from onstep.config.part import ChangeClass, ConfigPart
from onstep.config.parts import (
    AnomalyConfig,
    CheckpointConfig,
    ConfigContainer,
    DatasetConfig,
    DistributedDataParallelConfig,
    DistributedInitConfig,
    FaultToleranceConfig,
    ModelConfig,
    NVRxStragglerDetectionConfig,
    OptimizerConfig,
    PeftConfig,
    RerunStateMachineConfig,
    RNGConfig,
    RunConfig,
    SchedulerConfig,
    StragglerDetectionConfig,
    TokenizerConfig,
    TrainingConfig,
    ValidationConfig,
)
from onstep.config.reporting import LoggerConfig, ProfilingConfig
from onstep.config.rules import parse_split
from onstep.config.training_arguments import TrainingArguments, UnknownArgumentError
from onstep.config.validate import resolve, validate

__all__ = [
    "ABSENT",
    "AnomalyConfig",
    "Change",
    "ChangeClass",
    "CheckpointConfig",
    "ConfigContainer",
    "ConfigPart",
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
    "TrainingArguments",
    "TrainingConfig",
    "UnknownArgumentError",
    "ValidationConfig",
    "apply_overrides",
    "args_to_config",
    "changes",
    "classify",
    "config_to_args",
    "decide",
    "describe",
    "diff",
    "dump_yaml",
    "from_dict",
    "load_yaml",
    "meaning",
    "merge",
    "nearest_key",
    "parse_split",
    "parse_yaml",
    "resolve",
    "save_yaml",
    "steps_of_epochs",
    "steps_per_epoch",
    "to_flat",
    "train_iters",
    "validate",
]
