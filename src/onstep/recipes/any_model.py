"""Fine-tuning of whatever model the weights are of."""

from __future__ import annotations

from onstep.config import ConfigContainer, ModelConfig
from onstep.recipes.finetuning import finetuned
from onstep.recipes.large_run import large_run


def any_finetune_config(peft: str | None = None) -> ConfigContainer:
    """Whatever model the weights are of, fine-tuned on conversations.

    The model section is left to the weights: it is filled from `checkpoint.pretrained_checkpoint`. Sequences are of
    1,024 tokens. `peft`: None trains all weights, "lora" a few added ones.
    """
    config = finetuned(large_run("any", ModelConfig(seq_length=1024)), peft)
    config.train.micro_batch_size = 2
    return config
