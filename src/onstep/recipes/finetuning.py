"""What a recipe changes where it continues from trained weights."""

from __future__ import annotations

from onstep.config import ConfigContainer
from onstep.config.load import not_a_choice

FULL_LR = 1e-5
"""Peak learning rate where all weights of a large model are trained."""
LORA_LR = 2e-4
"""Peak learning rate of LoRA's matrices, which start at zero."""
NUM_EPOCHS = 3.0


def finetuned(config: ConfigContainer, peft: str | None, *, full_lr: float = FULL_LR) -> ConfigContainer:
    """A recipe for training from scratch, changed to one for fine-tuning on conversations. It is written to.

    Left to the user: the weights (`checkpoint.pretrained_checkpoint`) and the data (`dataset.paths`). `peft`: None
    trains all weights with the peak learning rate `full_lr`, "lora" a few added ones with its own.

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
