"""A run's configuration and its parts. Names and defaults are Megatron Bridge's where it has them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from onstep.config.model_config import ModelConfig
from onstep.config.optimizer_config import OptimizerConfig, SchedulerConfig
from onstep.config.part import SAFE, TRAJECTORY, ConfigPart, option
from onstep.config.reporting import LoggerConfig, ProfilingConfig
from onstep.config.safety_config import (
    AnomalyConfig,
    CheckpointConfig,
    FaultToleranceConfig,
    NVRxStragglerDetectionConfig,
    PeftConfig,
    RerunStateMachineConfig,
    StragglerDetectionConfig,
)
from onstep.config.training_config import DatasetConfig, TokenizerConfig, TrainingConfig, ValidationConfig

__all__ = [
    "AnomalyConfig",
    "CheckpointConfig",
    "ConfigContainer",
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
]


@dataclass
class RunConfig(ConfigPart):
    """What a run is called and where it is kept."""

    name: str | None = option(None, SAFE)
    """Folder of the run below `output_dir`. None keeps no folder; `onstep train` puts the recipe's name here."""
    output_dir: str = option("runs", SAFE)
    """Where run folders are kept."""
    recipe: str | None = option(None, SAFE)
    """Name of the recipe that this configuration started from."""
    fresh: bool = option(False, SAFE)
    """Start a new run `<name>-2` where a run of this name exists."""
    default_callbacks: bool = option(True, SAFE)
    """Put DefaultMetrics, ProgressCallback and InfoCallback first (`Trainer` and `onstep train`)."""
    save_weights: bool = option(True, SAFE)
    """Write the final weights to `<run>/model` as safetensors."""


@dataclass
class DistributedDataParallelConfig(ConfigPart):
    """Plain data parallelism (torch's DistributedDataParallel)."""

    bucket_cap_mb: float = option(25.0, SAFE, bound="> 0")
    """Size of a gradient bucket in MiB."""
    find_unused_parameters: bool = option(False, SAFE)
    """Look for parameters that a step did not use."""
    broadcast_buffers: bool = option(False, TRAJECTORY)
    """Send buffers from rank 0 at each forward pass."""
    gradient_as_bucket_view: bool = option(True, SAFE)
    """Let gradients be views of the buckets."""


@dataclass
class DistributedInitConfig(ConfigPart):
    """The process group."""

    distributed_backend: str | None = option(None, SAFE, choices=("gloo", "nccl"))
    """gloo | nccl; None is nccl where every rank has a GPU, else gloo."""
    distributed_timeout_minutes: float = option(10.0, SAFE, bound="> 0")
    """How long a collective may take."""
    device: str | None = option(None, SAFE)
    """cpu | cuda | cuda:<n>; None is CUDA where there is one."""


@dataclass
class RNGConfig(ConfigPart):
    """Where randomness starts."""

    seed: int = option(1234, TRAJECTORY, bound=">= 0")
    """Seed of weights and dropout."""
    data_seed: int | None = option(None, TRAJECTORY, bound=">= 0")
    """Order of the samples; None is `seed`."""


@dataclass
class ConfigContainer(ConfigPart):
    """Everything that makes a run. The user may change it until training starts, which validates a deep copy."""

    train: TrainingConfig = field(default_factory=TrainingConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)
    ddp: DistributedDataParallelConfig = field(default_factory=DistributedDataParallelConfig)
    dist: DistributedInitConfig = field(default_factory=DistributedInitConfig)
    rng: RNGConfig = field(default_factory=RNGConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    anomaly: AnomalyConfig = field(default_factory=AnomalyConfig)
    rerun_state_machine: RerunStateMachineConfig = field(default_factory=RerunStateMachineConfig)
    ft: FaultToleranceConfig = field(default_factory=FaultToleranceConfig)
    straggler: StragglerDetectionConfig = field(default_factory=StragglerDetectionConfig)
    nvrx_straggler: NVRxStragglerDetectionConfig = field(default_factory=NVRxStragglerDetectionConfig)
    peft: PeftConfig = field(default_factory=PeftConfig)
    run: RunConfig = field(default_factory=RunConfig)
    mixed_precision: str | None = option(None, TRAJECTORY)
    """None (float32), bf16_mixed or fp16_mixed (autocast over float32 weights; float16 with a loss scale)."""
    env_vars: dict[str, str] = option({}, SAFE)
    """Environment variables set before anything starts, unless they are set already."""
    trainer: dict[str, Any] = option({}, SAFE)
    """Fields of `TrainingArguments` that no part above names (`label_names`, `disable_tqdm`, ...), where they differ
    from their default. Only `Trainer` reads them."""

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dictionaries, as they go to YAML."""
        return asdict(self)
