"""`ConfigContainer`, the configuration of a run: its sections and the keys beside them."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module  # of what builds on this module
from pathlib import Path
from typing import Any

from onstep.config.bridge.effects import settle
from onstep.config.parallel_sizes import ParallelSizes
from onstep.config.section import INCOMPATIBLE, SAFE, TRAJECTORY, ConfigSection, option
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
from onstep.errors import ConfigError


@dataclass
class ConfigContainer(ConfigSection):
    """The configuration of a run. It may be changed until training starts, which validates a deep copy.

    Names and defaults are Megatron Bridge's where it has them. A section may be set to None, as several are there: it
    is then at its defaults.
    """

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
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    fsdp: FullyShardedConfig = field(default_factory=FullyShardedConfig)
    rng: RNGConfig = field(default_factory=RNGConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    anomaly: AnomalyConfig = field(default_factory=AnomalyConfig)
    rerun_state_machine: RerunStateMachineConfig = field(default_factory=RerunStateMachineConfig)
    ft: FaultToleranceConfig = field(default_factory=FaultToleranceConfig)
    straggler: StragglerDetectionConfig = field(default_factory=StragglerDetectionConfig)
    nvrx_straggler: NVRxStragglerDetectionConfig = field(default_factory=NVRxStragglerDetectionConfig)
    peft: PeftConfig = field(default_factory=PeftConfig)
    run: RunConfig = field(default_factory=RunConfig)
    mixed_precision: str | None = option(
        None,
        TRAJECTORY,
        choices=("bf16_mixed", "fp16_mixed"),
        spellings={"bf16-mixed": "bf16_mixed", "fp16-mixed": "fp16_mixed", "16-mixed": "fp16_mixed"},
        effect="weights and optimizer load as they are; steps compute in the current precision",
        known_as=("precision", "bf16", "fp16", "dtype"),
        common=True,
        help="Precision: None (float32), bf16_mixed or fp16_mixed (autocast over float32 weights; float16 with a "
        "loss scale).",
    )
    env_vars: dict[str, str] = option(
        {}, SAFE, entries={}, help="Environment variables to set before anything starts, unless they are set already."
    )
    trainer: dict[str, Any] = option(
        {},
        SAFE,
        entries={
            **dict.fromkeys(
                ("label_names", "label_smoothing_factor", "neftune_noise_alpha", "remove_unused_columns"), TRAJECTORY
            ),
            **dict.fromkeys(("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps"), TRAJECTORY),
            **dict.fromkeys(("optim", "optim_args", "optim_target_modules"), INCOMPATIBLE),
            **dict.fromkeys(("train_sampling_strategy", "length_column_name", "accelerator_config"), TRAJECTORY),
        },
        help="Fields of `TrainingArguments` that have no key above (`label_names`, `disable_tqdm`, ...), where "
        "they differ from their default. Only `Trainer` reads them.",
    )

    def __post_init__(self) -> None:
        self.join_sections()

    def __setattr__(self, name: str, value: Any) -> None:
        factory = getattr(type(self).__dataclass_fields__.get(name), "default_factory", None)
        if isinstance(factory, type) and issubclass(factory, ConfigSection):
            value = factory() if value is None else value
            if isinstance(value, ConfigSection) and not isinstance(value, factory):
                raise ConfigError(
                    f"{name} must be a {factory.__name__}, got {type(value).__name__}; set the section that it is."
                )
        super().__setattr__(name, value)
        if isinstance(value, ConfigSection) and vars(self).get("_whole") is self:
            value.join(self)

    def join_sections(self) -> None:
        """Make this the configuration that its sections are part of."""
        self.join(self)
        for name in self.field_names():
            section = getattr(self, name)
            if isinstance(section, ConfigSection):
                section.join(self)

    def settle(self) -> None:
        """Set what depends on several of Megatron Bridge's keys.

        Raises:
            ConfigError: for values that do not go together.
        """
        self.join_sections()
        settle(self)

    def parallel_sizes(self, num_ranks: int) -> ParallelSizes:
        """How many of a run's ranks work together along each axis.

        Args:
            num_ranks: the number of ranks in all.

        Raises:
            ConfigError: with the arithmetic, for sizes that do not make up the ranks.
        """
        sizes = self.parallel.sizes(num_ranks)
        if not self.ddp.use_distributed_optimizer or sizes.dp_shard > 1:
            return sizes
        instances = self.ddp.num_distributed_optimizer_instances
        if sizes.data % instances:
            choice = ", ".join(str(one) for one in range(1, sizes.data + 1) if sizes.data % one == 0)
            raise ConfigError(
                f"ddp.num_distributed_optimizer_instances={instances} must divide the {sizes.data} ranks with samples "
                f"of their own; choose one of {choice}."
            )
        return replace(sizes, dp_replicate=instances, dp_shard=sizes.data // instances)

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dictionaries, as they go to YAML."""
        return {**asdict(self), "mixed_precision": getattr(self.mixed_precision, "name", self.mixed_precision)}

    @classmethod
    def from_yaml(cls, path: str | Path) -> ConfigContainer:
        """The configuration in a YAML file, of Onstep or of Megatron Bridge's `to_yaml`.

        A key that the file lacks has Onstep's default. Classes that a file of Bridge names are not imported.

        Args:
            path: the YAML file.

        Raises:
            ConfigError: as `load_yaml` and `from_dict`; for a key of Bridge with a value that is not supported, by what
                it is.
        """
        load = import_module("onstep.config.load")
        config: ConfigContainer = load.from_dict(load.load_yaml(path))
        return config

    def to_yaml(self, path: str | Path | None = None) -> None:
        """Write the configuration to a YAML file, which `from_yaml` reads; None prints it.

        Args:
            path: the file to write; None prints it.
        """
        load = import_module("onstep.config.load")
        if path is None:
            sys.stdout.write(load.dump_yaml(self))
        else:
            load.save_yaml(self, path)

    def print_yaml(self) -> None:
        """Print the configuration as YAML."""
        self.to_yaml()
