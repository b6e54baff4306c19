"""What a recipe changes where it continues from trained weights, and the recipe for whatever model these are of."""

from __future__ import annotations

from onstep.config import ConfigContainer, ModelConfig
from onstep.config.rules import not_a_choice
from onstep.recipes.large_run import large_run

FULL_LR = 1e-5
"""Peak learning rate where all weights of a large model are trained."""
LORA_LR = 2e-4
"""Peak learning rate of LoRA's matrices, which start at zero."""
NUM_EPOCHS = 3.0


def finetuned(config: ConfigContainer, peft: str | None, *, full_lr: float = FULL_LR) -> ConfigContainer:
    """A recipe for training from scratch, changed to one for fine-tuning on conversations. It is written to.

    Left to the user: the weights (`checkpoint.pretrained_checkpoint`) and the data (`dataset.paths`).

    Args:
        config: the configuration to change.
        peft: None trains all weights, "lora" a few added ones.
        full_lr: peak learning rate without `peft`; LoRA has its own.

    Raises:
        ConfigError: for another value of `peft`.
    """
    if peft not in (None, "lora"):
        raise not_a_choice("peft", peft, ("None", "lora"))
    name = f"{config.run.recipe}_finetune"
    config.run.recipe = name if peft is None else f"{name}_{peft}"
    config.peft.peft_scheme = peft
    config.checkpoint.finetune = True
    config.checkpoint.save_interval = 200
    config.dataset.kind = "chat"
    config.train.train_iters, config.train.num_epochs = None, NUM_EPOCHS
    config.train.global_batch_size, config.train.drop_last = 16, False
    config.optimizer.lr = full_lr if peft is None else LORA_LR
    config.optimizer.min_lr = config.optimizer.lr / 10
    config.optimizer.weight_decay = 0.0
    config.scheduler.lr_warmup_iters, config.scheduler.lr_warmup_fraction = 0, 0.03
    config.validation.eval_interval, config.validation.eval_iters = 100, 16
    return config


def any_finetune_config(peft: str | None = None) -> ConfigContainer:
    """Whatever model the weights are of, fine-tuned on conversations.

    The model section is left to the weights: it is filled from `checkpoint.pretrained_checkpoint`. Sequences are of
    1,024 tokens. `peft`: None trains all weights, "lora" a few added ones.
    """
    config = finetuned(large_run("any", ModelConfig(seq_length=1024)), peft)
    config.train.micro_batch_size = 2
    return config
