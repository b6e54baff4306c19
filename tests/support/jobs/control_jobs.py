"""What the ranks of the control tests run: `job_*(settings)`."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from onstep import Callback, CallbackManager, JsonLogger, pretrain
from onstep.callbacks import TrainerControlCallback
from tests.support.small_configs import small_pretrain_config


class Records(Callback):
    """Writes after each step what is in force on this rank, one line a step, and sleeps for a while."""

    def __init__(self, path: Path, seconds: float) -> None:
        self.path, self.seconds = path, seconds

    def on_train_start(self, context: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"pid": os.getpid(), "from": context.step}) + "\n")

    def on_step_begin(self, context: Any) -> None:
        time.sleep(self.seconds)
        line = {"step": context.step + 1, **context.state.train_state.overrides, "at": time.time()}
        line["lr"] = context.optimizer.param_groups[0]["lr"]
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


class Ends(Callback):
    """Ends the process after a step, in one way or another."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings

    def on_step_end(self, context: Any) -> None:
        if context.step == self.settings.get("raises_at"):
            raise ValueError("as planned")
        if context.step == self.settings.get("leaves_at"):
            raise SystemExit(3)
        if context.step == 2 and self.settings.get("counts_sockets"):
            import psutil

            listening = [one for one in psutil.Process().net_connections() if one.status == psutil.CONN_LISTEN]
            Path("listening").write_text(str(len(listening)))


def job_steered(settings: dict[str, Any]) -> None:
    rank = os.environ.get("RANK", "0")
    os.environ["ONSTEP_REGISTRY"] = settings["registry"]
    config = small_pretrain_config(settings["corpus"], settings["cache"])
    config.run.name, config.run.output_dir = "run", "runs"
    config.train.train_iters, config.train.global_batch_size, config.train.micro_batch_size = settings["steps"], 4, 2
    config.logger.log_interval, config.validation.eval_interval, config.validation.eval_iters = 1000, 1_000_000, 1
    config.checkpoint.save_interval, config.checkpoint.most_recent_k = settings.get("save_interval", 1_000_000), -1
    config.scheduler.lr_decay_style = "constant"
    config.ft.watchdog_seconds = settings.get("watchdog_seconds", 60.0)
    manager = CallbackManager()
    manager.add([JsonLogger(), Records(Path(f"steps-{rank}.jsonl"), settings.get("seconds", 0.01))])
    manager.add(Ends(settings))
    if settings.get("is_controlled", True):
        manager.add(TrainerControlCallback(settings["job_id"], port=0))
    pretrain(config, callbacks=manager)
