"""What the processes of the tests of trackers run: `job_*(settings)`."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from onstep import CallbackManager, pretrain
from onstep.config import ConfigContainer, apply_overrides
from onstep.metrics import reduce_max_memory_across_pp_group
from tests.support.small_configs import small_pretrain_config
from tests.support.waiting import PATIENCE

RANK = int(os.environ.get("RANK", "0"))


def small_config(settings: dict[str, Any]) -> ConfigContainer:
    """12 steps of 8 samples, a checkpoint after every fourth, logs after every third."""
    config = small_pretrain_config(settings["corpus"] + "/colorsys.py", settings["cache"])
    config.run.name, config.run.save_weights = "run", False
    config.dataset.num_workers = 0
    config.train.global_batch_size, config.train.micro_batch_size, config.train.train_iters = 8, 2, 12
    config.logger.log_interval = 3
    config.validation.eval_interval, config.validation.eval_iters = 4, 1
    config.checkpoint.save_interval = 4
    config.logger.tensorboard_dir, config.logger.log_timers_to_tensorboard = "tb", True
    config.logger.log_world_size_to_tensorboard = True
    apply_overrides(config, settings.get("words", []))
    return config


def job_run(settings: dict[str, Any]) -> None:
    """Train; with `dies_at` the last rank kills itself when that step begins, once the trackers are filled."""
    manager = CallbackManager()

    def die(context: Any) -> None:
        if context.state.train_state.step == settings.get("dies_at") and context.state.is_last_rank:
            for one in context.state.bridge_trackers.loggers.values():
                is_open = threading.Event()
                one.feed.call(is_open.set)
                assert is_open.wait(PATIENCE)
            time.sleep(settings.get("patience", 0.5))
            os.kill(os.getpid(), signal.SIGKILL)

    manager.register("on_step_begin", die)
    state = pretrain(small_config(settings), callbacks=manager)
    loggers = [name for name in ("tensorboard", "wandb", "mlflow", "comet") if getattr(state, f"{name}_logger")]
    Path(f"result-{RANK}.json").write_text(
        json.dumps({"loggers": loggers, "run_id": state.bridge_trackers.state_dict()["run_id"]})
    )


def job_stages(settings: dict[str, Any]) -> None:
    """Reduce a report over two ranks, as if they were pipeline stages."""
    dist.init_process_group("gloo", rank=RANK, world_size=2)
    report = {"mem-gigabytes": 1.5 - RANK, "mem-count": 2**24 + 1 + RANK, "mem-other": 0.25 + RANK}
    reduced = reduce_max_memory_across_pp_group(report, dist.group.WORLD)
    Path(f"result-{RANK}.json").write_text(json.dumps(reduced))
    dist.destroy_process_group()
