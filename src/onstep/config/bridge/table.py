"""All of Megatron Bridge's keys that are not Onstep's: by the class of their section, and by their dotted names."""

from __future__ import annotations

from onstep.config.bridge.architecture_keys import ARCHITECTURE
from onstep.config.bridge.data_keys import DATASET, TOKENIZER
from onstep.config.bridge.effects import EFFECTS
from onstep.config.bridge.model_keys import MEMORY_AND_SPEED, PARALLELISM, PRECISION
from onstep.config.bridge.rules import Rule
from onstep.config.bridge.run_keys import (
    BESIDE_SECTIONS,
    CHECKPOINT,
    DDP,
    DIST,
    LOGGER,
    NVRX_STRAGGLER,
    OPTIMIZER,
    PEFT,
    RNG,
    SCHEDULER,
    TRAIN,
    VALIDATION,
)

SECTIONS = {
    "ConfigContainer": "",
    "TrainingConfig": "train",
    "ValidationConfig": "validation",
    "ModelConfig": "model",
    "OptimizerConfig": "optimizer",
    "SchedulerConfig": "scheduler",
    "DatasetConfig": "dataset",
    "TokenizerConfig": "tokenizer",
    "LoggerConfig": "logger",
    "DistributedDataParallelConfig": "ddp",
    "DistributedInitConfig": "dist",
    "RNGConfig": "rng",
    "CheckpointConfig": "checkpoint",
    "StragglerDetectionConfig": "straggler",
    "NVRxStragglerDetectionConfig": "nvrx_straggler",
    "PeftConfig": "peft",
}
"""The name of each section whose class has such keys."""

_NEUTRAL: dict[str, dict[str, Rule]] = {
    "": BESIDE_SECTIONS,
    "train": TRAIN,
    "validation": VALIDATION,
    "model": {**PARALLELISM, **PRECISION, **MEMORY_AND_SPEED, **ARCHITECTURE},
    "optimizer": OPTIMIZER,
    "scheduler": SCHEDULER,
    "dataset": DATASET,
    "tokenizer": TOKENIZER,
    "logger": LOGGER,
    "ddp": DDP,
    "dist": DIST,
    "rng": RNG,
    "checkpoint": CHECKPOINT,
    "straggler": {},
    "nvrx_straggler": NVRX_STRAGGLER,
    "peft": PEFT,
}

RULES: dict[str, dict[str, Rule]] = {
    name: {**EFFECTS.get(section, {}), **_NEUTRAL[section]} for name, section in SECTIONS.items()
}
"""By the name of the section's class and the key's name."""


def rule_of(kind: type, name: str) -> Rule | None:
    """The rule of a key in a section of this class; None if Bridge has no such key, or Onstep has it."""
    for one in kind.__mro__:
        if one.__name__ in RULES:
            return RULES[one.__name__].get(name)
    return None


def dotted(kind: type, name: str) -> str:
    """The key's name with its section's."""
    section = next((SECTIONS[one.__name__] for one in kind.__mro__ if one.__name__ in SECTIONS), "")
    return f"{section}.{name}" if section else name
