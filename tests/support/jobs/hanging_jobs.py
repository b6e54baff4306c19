"""Runs in which one rank raises, hangs, dies or is slow:
`-m tests.support.jobs.hanging_jobs JOB DIRECTORY SETTINGS`.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onstep import Callback, Trainer, TrainingArguments
from onstep.config import ConfigContainer
from onstep.data import TrainLoader
from onstep.distributed import open_world
from onstep.training import GlobalState, train
from onstep.training.watchdog.exchange import RankExchange
from onstep.training.watchdog.stacks import StackDump
from tests.support.small_runs import RaggedRows, TinyModel, sum_step

ROWS, LENGTH, VOCABULARY = 64, 12, 16
HANGS = {"sleep", "read", "late", "stop", "hold", "start"}
"""What only the watchdog's limit ends."""


def is_cause(settings: dict[str, Any]) -> bool:
    """Whether this rank is the one that misbehaves."""
    suspect = settings.get("suspect", 1)
    return suspect == "all" or bool(suspect == int(os.environ.get("RANK", "0")))


class Rows(torch.utils.data.Dataset[Any]):
    """Rows of tokens; reading any of them, but for the first, takes for ever on request."""

    def __init__(self, *, stands: bool = False) -> None:
        self.stands = stands

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.stands and index > 0:
            Path("began").write_text(str(time.time()))
            time.sleep(10_000)
        tokens = torch.randint(0, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"tokens": tokens, "labels": tokens.roll(-1)}


class Model(nn.Module):
    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        self.settings, self.calls = settings, 0
        self.embed, self.out = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)

    def train(self, mode: bool = True) -> Model:
        """The last thing that the loop does before its first collective; slow on request."""
        if mode and self.settings["how"] == "start" and is_cause(self.settings):
            time.sleep(self.settings["seconds"])
        return super().train(mode)

    def forward(self, tokens: Any, labels: Any) -> dict[str, Any]:
        self.calls += 1
        if self.settings["how"] == "late" and is_cause(self.settings) and self.calls == 3:
            Path("began").write_text(str(time.time()))
            time.sleep(10_000)
        logits = self.out(self.embed(tokens))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Misbehaves(Callback):
    """Does something at the end of the third step, on the rank at fault."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.notified: list[str] = []

    def on_step_end(self, context: Any) -> None:
        if context.state.train_state.step == self.settings.get("at", 3) and is_cause(self.settings):
            Path("began").write_text(str(time.time()))
            globals()[f"do_{self.settings['how']}"](self.settings)

    def on_train_step_end(self, context: Any) -> None:
        time.sleep(self.settings.get("pace", 0.0))
        if self.settings["how"] == "dawdle" and is_cause(self.settings):
            for _ in range(round(self.settings["seconds"] / 0.05)):  # goes on after a pause of the process
                time.sleep(0.05)

    def on_exception(self, context: Any) -> None:
        self.notified.append(f"exception {type(context.exception).__name__}")

    def on_run_end(self, context: Any) -> None:
        if is_cause(self.settings):
            time.sleep(self.settings.get("last_words", 0.0))
        self.notified.append(f"end {context.reason}")
        Path(f"told-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(self.notified))


def do_nothing(settings: dict[str, Any]) -> None:
    pass


do_dawdle = do_read = do_late = do_start = do_nothing


def do_interrupt(settings: dict[str, Any]) -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(10_000)


def do_interrupt_all(settings: dict[str, Any]) -> None:
    """Ctrl-C, while the other rank waits in a collective."""
    time.sleep(0.3)
    os.kill(int(Path("pid-0").read_text()), signal.SIGINT)
    do_interrupt(settings)


def do_raise(settings: dict[str, Any]) -> None:
    raise ValueError("a fault of its own")


def do_raise_alone(settings: dict[str, Any]) -> None:
    """Raise while the store does not answer; how long the end waits for its readers is written to `lingers.json`."""
    stop = RankExchange.stop

    def exchange(self: RankExchange) -> None:
        raise RuntimeError("the store does not answer")

    def noted(self: RankExchange, linger_seconds: float) -> None:
        Path("lingers.json").write_text(json.dumps(linger_seconds))
        stop(self, linger_seconds)

    RankExchange._exchange, RankExchange.stop = exchange, noted  # type: ignore[method-assign]
    do_raise(settings)


def do_sleep(settings: dict[str, Any]) -> None:
    time.sleep(10_000)


def do_hold(settings: dict[str, Any]) -> None:
    """Sleep in C without ever giving the interpreter back."""
    ctypes.PyDLL(None).sleep(10_000)


def do_kill(settings: dict[str, Any]) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def do_ask_twice(settings: dict[str, Any]) -> None:
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1.2)


def do_stop(settings: dict[str, Any]) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def do_exit(settings: dict[str, Any]) -> None:
    sys.exit(7)


def job_abort_with_a_stack_dump(settings: dict[str, Any]) -> None:
    """Leave the file of a stack dump in the current directory."""
    tempfile.tempdir = "."
    StackDump(is_alone=False)
    os.abort()


def job_train(settings: dict[str, Any]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what it starts in the background
    torch.manual_seed(0)
    torch.set_num_threads(1)
    callback = Misbehaves(settings)
    Path(f"pid-{os.environ.get('RANK', '0')}").write_text(str(os.getpid()))
    stands = settings["how"] == "read" and is_cause(settings)
    args = TrainingArguments(
        output_dir="run",
        per_device_train_batch_size=2,
        max_steps=settings.get("max_steps", 5),
        dataloader_num_workers=settings.get("num_workers", 0),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        config_overrides={
            "ft.watchdog_seconds": settings.get("seconds_allowed", 3.0 if settings["how"] in HANGS else 10.0),
            **settings.get("overrides", {}),
        },
    )
    Trainer(
        Model(settings), args, train_dataset=Rows(stands=stands), callbacks=[callback], default_callbacks=False
    ).train()


class Deep(TinyModel):
    """A model with a block that rank 1 leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8)])

    def forward(self, tokens: Any, labels: Any, reduction: str = "sum") -> Any:
        losses = super().forward(tokens, labels, reduction)
        return losses if os.environ["RANK"] == "1" else losses + 0 * self.blocks[0](torch.ones(8)).sum()


def job_leave_out_a_block(settings: dict[str, Any]) -> None:
    """Train a model whose block is divided and not called by all ranks."""
    from torch.distributed.fsdp import fully_shard

    config = ConfigContainer()
    config.train.micro_batch_size, config.train.global_batch_size, config.train.train_iters = 2, 4, 6
    config.dist.device, config.ft.watchdog_seconds, config.run.output_dir = "cpu", 3.0, "."
    world = open_world(config.dist)
    model = Deep()
    fully_shard(model.blocks[0])
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TrainLoader(RaggedRows(24), micro_batch_size=2, global_batch_size=4, rank=world.rank, world_size=2)
    train(sum_step, [model], optimizer, None, data, None, GlobalState(config, world))


def job_train_and_look(settings: dict[str, Any]) -> None:
    """Train, and tell which threads are left."""
    job_train(settings)
    names = [thread.name for thread in threading.enumerate()]
    Path(f"threads-{os.environ['RANK']}.json").write_text(json.dumps(names))


def job_traced(settings: dict[str, Any]) -> None:
    """Train under a debugger's eyes, which hold the run for 3 seconds."""
    globals()["do_sleep"] = lambda settings: time.sleep(3)
    sys.settrace(lambda *_: None)
    job_train(settings)


class SleepsOnRankOne(Callback):
    """Sleeps for ever at the end of the second step."""

    def on_step_end(self, context: Any) -> None:
        if context.state.train_state.step == 2 and context.rank == 1:
            time.sleep(10_000)


def main() -> None:
    job, directory, settings = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    os.chdir(directory)
    globals()[f"job_{job}"](settings)


if __name__ == "__main__":
    main()
