"""The configuration of a run: `ConfigContainer`, from YAML and `a.b=c` overrides, or from `TrainingArguments`.

`sections` declares the keys, each in one place; `checks` has the rules of whole configurations, and `hf` converts
Hugging Face's arguments. Nothing here imports torch.
"""

from onstep.config.checks import resolve, validate
from onstep.config.checks.data import parse_split
from onstep.config.container import ConfigContainer
from onstep.config.differences import ABSENT, Change, changes, classify, decide, describe, meaning
from onstep.config.explanation import explain
from onstep.config.hf import (
    Seq2SeqTrainingArguments,
    TrainingArguments,
    UnknownArgumentError,
    args_to_config,
    config_to_args,
)
from onstep.config.keys import KEYS, Key, diff, keys_of, nearest_key, to_flat
from onstep.config.lengths import steps_of_epochs, steps_per_epoch, train_iters
from onstep.config.load import apply_overrides, dump_yaml, from_dict, load_yaml, merge, parse_yaml, save_yaml
from onstep.config.section import ChangeClass, ConfigSection, option
from onstep.config.sections.anomaly import AnomalyConfig, RerunStateMachineConfig
from onstep.config.sections.checkpoint import CheckpointConfig
from onstep.config.sections.data import DatasetConfig, RNGConfig, TokenizerConfig
from onstep.config.sections.fault_tolerance import (
    FaultToleranceConfig,
    NVRxStragglerDetectionConfig,
    StragglerDetectionConfig,
)
from onstep.config.sections.fsdp import FullyShardedConfig
from onstep.config.sections.logger import LoggerConfig
from onstep.config.sections.model import ModelConfig
from onstep.config.sections.optimizer import OptimizerConfig, SchedulerConfig
from onstep.config.sections.parallel import ParallelConfig
from onstep.config.sections.peft import PeftConfig
from onstep.config.sections.profiling import ProfilingConfig
from onstep.config.sections.run import DistributedDataParallelConfig, DistributedInitConfig, RunConfig
from onstep.config.sections.training import TrainingConfig, ValidationConfig

__all__ = [
    "ABSENT",
    "AnomalyConfig",
    "Change",
    "ChangeClass",
    "CheckpointConfig",
    "ConfigContainer",
    "ConfigSection",
    "DatasetConfig",
    "DistributedDataParallelConfig",
    "DistributedInitConfig",
    "FaultToleranceConfig",
    "KEYS",
    "Key",
    "FullyShardedConfig",
    "LoggerConfig",
    "ModelConfig",
    "NVRxStragglerDetectionConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PeftConfig",
    "ProfilingConfig",
    "RNGConfig",
    "RerunStateMachineConfig",
    "RunConfig",
    "SchedulerConfig",
    "StragglerDetectionConfig",
    "TokenizerConfig",
    "Seq2SeqTrainingArguments",
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
    "explain",
    "from_dict",
    "keys_of",
    "load_yaml",
    "meaning",
    "merge",
    "nearest_key",
    "option",
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
