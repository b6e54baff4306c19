"""Turns a recipe for training from scratch into one for fine-tuning pretrained weights."""

from __future__ import annotations

from onstep.config import ConfigContainer
from onstep.config.suggestions import not_a_choice

FULL_LR = 1e-5
"""Peak learning rate for training all weights of a large model."""
LORA_LR = 2e-4
"""Peak learning rate of LoRA matrices, which start at zero."""
NUM_EPOCHS = 3.0


def finetuned(config: ConfigContainer, peft: str | None, *, full_lr: float = FULL_LR) -> ConfigContainer:
    """Change a recipe for training from scratch, in place, to one for fine-tuning on conversations.

    The user supplies the weights (`checkpoint.pretrained_checkpoint`) and the data (`dataset.paths`). `peft=None`
    trains all weights with the peak learning rate `full_lr`, `peft="lora"` a few added ones with the rate of LoRA.

    Raises:
        ConfigError: for any other value of `peft`.
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
