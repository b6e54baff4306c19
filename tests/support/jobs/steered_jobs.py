"""What the ranks run that are sent commands, each after its step, and that die at an event: `job_*(settings)`."""

from __future__ import annotations

import os
import signal
from typing import Any
from uuid import uuid4

from onstep import Callback, CallbackManager, JsonLogger, pretrain
from onstep.config import apply_overrides
from onstep.events import Request
from tests.support.small_configs import small_pretrain_config


class Sends(Callback):
    """Sends requests from outside, on one rank; a step is passed once."""

    ranks = "all"

    def __init__(self, plan: dict[str, list[tuple[str, dict[str, Any]]]], rank: int = 0) -> None:
        self.plan, self.rank = dict(plan), rank

    def on_step_end(self, context: Any) -> None:
        identity = uuid4().hex
        for flag, details in self.plan.pop(str(context.step), []) if context.state.world.rank == self.rank else []:
            sent = {"command_id": identity, **details}
            context.control.add_request(Request(flag, "someone", "", "", 0, sent))


def job_sent(settings: dict[str, Any]) -> dict[str, Any]:
    config = small_pretrain_config(settings["corpus"] + "/colorsys.py", settings["cache"], length=32)
    config.run.name, config.run.output_dir = "run", "runs"
    config.dataset.num_workers = 0
    config.train.train_iters, config.train.global_batch_size, config.train.micro_batch_size = 14, 4, 2
    config.logger.log_interval, config.validation.eval_interval, config.validation.eval_iters = 1000, None, 1
    config.checkpoint.save_interval, config.checkpoint.most_recent_k = 4, 2
    apply_overrides(config, settings.get("words", []))
    manager = CallbackManager()
    manager.add([JsonLogger(), Sends(settings.get("plan", {}), settings.get("sender", 0))])
    for event, number in settings.get("dies", {}).items():
        calls = iter(range(1, 1000))
        manager.register(event, lambda context, calls=calls, number=number: next(calls) == number and _die())
    state = pretrain(config, callbacks=manager)
    return {"ended": state.ending.ended, "step": state.train_state.step, "in_force": state.train_state.overrides}


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
