"""Runs in which one rank fails at one event, in either door: `job_*(settings)`."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onstep import Callback, Trainer, TrainingArguments, pretrain
from onstep.config import apply_overrides
from onstep.events.manager import VALID_EVENTS
from onstep.training.watchdog.exchange import RankExchange
from tests.support.jobs.hanging_jobs import Model, Rows
from tests.support.small_configs import small_pretrain_config

HANGS = {"hang", "collective", "barrier", "stop"}
"""Faults that only the watchdog's limit ends."""


def limit_of(settings: dict[str, Any]) -> float:
    """Seconds of the watchdog: few if it must end the run; a rank that dies is found without, so nobody is hurried."""
    return float(settings.get("seconds", 3.0 if settings["fault"] in HANGS else 10.0))


def _raise(error: type[BaseException]) -> Callable[[], None]:
    def fault() -> None:
        raise error("a fault of the test")

    return fault


FAULTS: dict[str, Callable[[], object]] = {
    "raise": _raise(ValueError),
    "memory": _raise(MemoryError),
    "interrupt": _raise(KeyboardInterrupt),
    "exit": lambda: sys.exit(3),
    "exit0": lambda: sys.exit(0),
    "os_exit": lambda: os._exit(4),
    "os_exit0": lambda: os._exit(0),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "abort": os.abort,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "allocation": _raise(torch.OutOfMemoryError),
    "hang": lambda: time.sleep(10_000),
    "collective": lambda: dist.all_reduce(torch.ones(3)),
    "barrier": dist.barrier,
    "stop_iteration": _raise(StopIteration),
}


class Faulty(Callback):
    """Fails once, at one event on one rank; at the second of its kind if `nth` says so, and at `then` in another way.

    Args:
        settings: of the job; `then` is another event and its fault.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings, self.seen = settings, 0

    def come(self, event: str) -> None:
        is_suspect = self.settings["suspect"] in (int(os.environ.get("RANK", "0")), "all")
        then = self.settings.get("then", (None, None))
        if event == self.settings["event"]:
            self.seen += 1
            if self.seen == self.settings.get("nth", 1) and is_suspect:
                print(f"at {event}", flush=True)
                Path(f"at-{event}").touch()
                FAULTS[self.settings["fault"]]()
            elif self.seen == 1:
                print(f"past {event}", flush=True)
        elif event == then[0] and is_suspect:
            FAULTS[then[1]]()

    def state_dict(self) -> dict[str, Any]:
        self.come("state_dict")
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.come("load_state_dict")


def _at(event: str) -> Callable[..., None]:
    return lambda self, context: self.come(event)


for _name in VALID_EVENTS:
    setattr(Faulty, _name, _at(_name))


class InPasses(Callback):
    """Lets a callback fail in a `forward` or a `backward` pass of the second step; each linear layer counts."""

    ranks = "all"

    def __init__(self, faulty: Faulty) -> None:
        self.faulty, self.is_second = faulty, False

    def on_step_end(self, context: Any) -> None:
        self.is_second = True

    def on_train_start(self, context: Any) -> None:
        for module in (module for chunk in context.model for module in chunk.modules()):
            if isinstance(module, nn.Linear):
                module.register_forward_hook(self.after_forward)

    def after_forward(self, module: nn.Module, args: Any, result: Tensor) -> None:
        if self.is_second:
            self.faulty.come("forward")
        if self.is_second and result.requires_grad:
            result.register_hook(lambda gradient: self.faulty.come("backward"))


def read_late(settings: dict[str, Any]) -> None:
    """Have the rank `reads_late`, once it has failed, take long for each look at what the others say."""
    if settings.get("reads_late") == int(os.environ.get("RANK", "0")):
        exchange = RankExchange._exchange

        def late(self: RankExchange) -> None:
            time.sleep(1.5 if self.record.failure is not None else 0.0)
            exchange(self)

        RankExchange._exchange = late  # type: ignore[method-assign]


def job_pretrain(settings: dict[str, Any]) -> None:
    read_late(settings)
    config = small_pretrain_config(settings["corpus"], settings["cache"], layers=settings.get("layers", 1))
    config.run.name, config.run.output_dir = "run", "."
    config.train.train_iters, config.train.global_batch_size, config.train.micro_batch_size = 4, 12, 1
    config.validation.eval_interval, config.validation.eval_iters = 2, 2
    config.logger.log_interval, config.checkpoint.save_interval = 1, 2
    config.ft.watchdog_seconds = limit_of(settings)
    apply_overrides(config, settings.get("keys", []))
    faulty = Faulty(settings)
    pretrain(config, callbacks=[faulty, InPasses(faulty)])


def job_trainer(settings: dict[str, Any]) -> None:
    trainer(Faulty(settings)).train()


def job_evaluate(settings: dict[str, Any]) -> None:
    """Fail in the evaluation or prediction that follows the training."""
    faulty = Faulty({**settings, "suspect": None})
    trained = trainer(faulty)
    trained.train()
    faulty.settings, faulty.seen = settings, 0
    getattr(trained, settings["method"])(Rows())


def trainer(faulty: Faulty) -> Trainer:
    torch.manual_seed(0)
    args = TrainingArguments(
        output_dir="run",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=4,
        eval_strategy="steps",
        eval_steps=2,
        save_steps=2,
        logging_steps=1,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        config_overrides={"ft.watchdog_seconds": limit_of(faulty.settings)},
    )
    return Trainer(
        Model({"how": "nothing"}),
        args,
        train_dataset=Rows(),
        eval_dataset=Rows(),
        callbacks=[faulty],
        default_callbacks=False,
    )
