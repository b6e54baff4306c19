"""The rules of fine-tuning: where the weights come from, and what LoRA goes to."""

from __future__ import annotations

from pathlib import Path

from onstep.config.parts import ConfigContainer
from onstep.errors import ConfigError


def check_finetune(config: ConfigContainer) -> None:
    """Refuse fine-tuning of nothing, of two things at once, and LoRA on weights that stay random.

    Raises:
        ConfigError: naming the value, the rule and the remedy.
    """
    checkpoint, peft = config.checkpoint, config.peft
    sources = [name for name in ("pretrained_checkpoint", "load") if getattr(checkpoint, name) is not None]
    if checkpoint.finetune and not sources:
        raise ConfigError(
            "checkpoint.finetune=True takes weights to start from; set checkpoint.pretrained_checkpoint to a Hugging "
            "Face folder, a run or a checkpoint."
        )
    if checkpoint.finetune and len(sources) == 2 and not loads_own(config):
        raise ConfigError(
            f"checkpoint.pretrained_checkpoint={checkpoint.pretrained_checkpoint} and checkpoint.load="
            f"{checkpoint.load} both name the weights to fine-tune; keep one and set the other to null."
        )
    if peft.peft_scheme is None:
        return
    if not sources:
        raise ConfigError(
            f"peft.peft_scheme={peft.peft_scheme} trains a few weights beside trained ones, and there are none; set "
            f"checkpoint.pretrained_checkpoint, or peft.peft_scheme=null to train all weights."
        )
    if peft.target_modules == []:
        raise ConfigError(
            "peft.target_modules=[] adds weights to no layer; name ends such as [query, value], or null for every "
            "projection."
        )


def loads_own(config: ConfigContainer) -> bool:
    """Whether `checkpoint.load` is the folder that the run saves to: it then continues the run."""
    checkpoint, run = config.checkpoint, config.run
    if checkpoint.load is None:
        return False
    own = checkpoint.save
    if own is None and run.name is not None:
        own = str(Path(run.output_dir) / run.name / "checkpoints")
    return own is not None and Path(own).resolve() == Path(checkpoint.load).resolve()
