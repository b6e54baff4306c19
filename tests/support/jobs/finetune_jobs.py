"""What the tests of fine-tuning run in processes of their own: `job_*(settings)`."""

from __future__ import annotations

import os
import signal
from typing import Any

from onstep import CallbackManager, JsonLogger, finetune
from onstep.config import ConfigContainer, apply_overrides
from onstep.recipes import tiny_gpt_finetune_config


def small_finetune(settings: dict[str, Any]) -> ConfigContainer:
    """9 steps on text, with dropout in LoRA's matrices, a checkpoint every 2."""
    config = tiny_gpt_finetune_config(peft=settings.get("peft"))
    config.run.name, config.checkpoint.pretrained_checkpoint = "run", settings["weights"]
    config.dataset.kind, config.dataset.paths = "text", [settings["corpus"] + "/colorsys.py"]
    config.dataset.cache_dir, config.dataset.split = settings["cache"], "80,10,10"
    config.dataset.seq_length = config.model.seq_length = 32
    config.train.num_epochs, config.train.train_iters, config.train.global_batch_size = None, 9, 4
    config.optimizer.lr, config.optimizer.min_lr = 1e-2, 1e-3
    config.peft.dim, config.peft.dropout = 4, 0.1
    config.validation.eval_on_start, config.validation.eval_interval, config.validation.eval_iters = False, 4, 2
    config.checkpoint.save_interval, config.checkpoint.most_recent_k, config.logger.log_interval = 2, -1, 3
    config.dist.device = "cpu"
    apply_overrides(config, settings.get("words", []))
    return config


def job_finetune(settings: dict[str, Any]) -> None:
    """Fine-tune; with `dies_at` rank 0 kills itself in the middle of that step."""
    manager = CallbackManager()
    manager.add(JsonLogger())
    step = settings.get("dies_at")
    if step is not None:
        manager.register("on_train_step_end", lambda context: _die_at(step, context))
    finetune(small_finetune(settings), callbacks=manager)


def _die_at(step: int, context: Any) -> None:
    if context.state.train_state.step + 1 == step and os.environ.get("RANK", "0") == "0":
        os.kill(os.getpid(), signal.SIGKILL)
