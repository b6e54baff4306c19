"""What the processes of the sinks' tests run: a small real training with trackers, killed where its settings say."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from onstep import CallbackManager, JsonLogger, pretrain
from onstep.callbacks import MetricSinks
from onstep.config import ConfigContainer, apply_overrides
from onstep.recipes import tiny_gpt_pretrain_config


def small_config(settings: dict[str, Any]) -> ConfigContainer:
    """11 steps: a log at every step, an evaluation at every second, a checkpoint at every third."""
    config = tiny_gpt_pretrain_config()
    config.run.name, config.run.output_dir, config.run.save_weights = "run", settings.get("output_dir", "runs"), False
    config.dataset.paths, config.dataset.cache_dir = [settings["corpus"] + "/colorsys.py"], settings["cache"]
    config.dataset.split, config.dataset.num_workers = "80,10,10", 0
    config.dataset.seq_length = config.model.seq_length = 32
    config.train.global_batch_size = config.train.micro_batch_size = 4
    config.train.train_iters, config.scheduler.lr_warmup_iters = 11, 2
    config.model.num_layers, config.model.hidden_size, config.model.num_attention_heads = 1, 16, 2
    config.logger.log_interval, config.validation.eval_on_start = 1, True
    config.validation.eval_interval, config.validation.eval_iters = 2, 1
    config.checkpoint.save_interval = 3
    config.dist.device = "cpu"
    apply_overrides(config, settings.get("words", []))
    return config


def job_train(settings: dict[str, Any]) -> None:
    """Train with every tracker that `sinks` names, and be killed at the `number`-th telling of `event`."""
    manager = CallbackManager()
    sinks = MetricSinks(settings.get("sinks", ["csv", "tensorboard"]))
    manager.add([JsonLogger(), sinks])
    told = iter(range(1, 1_000_000))

    def die(context: Any) -> None:
        if next(told) == settings["number"]:
            os.kill(os.getpid(), signal.SIGKILL)

    if "event" in settings:
        manager.register(settings["event"], die)
    pretrain(small_config(settings), callbacks=manager)
    Path("ended.json").write_text(json.dumps({"dropped": sinks.dropped}))
