"""What a tracker costs a training, also one that misbehaves: step times of a small GPT, interleaved, medians.

Run with `python benchmarks/trackers.py`. Steps take milliseconds and every one is logged, which is the worst case. Each
short training with a tracker is followed by the same one without; a row shows the median of the ratios of their median
times from step to step, and the limit is 1.05. The row "none" compares two trainings without a tracker: what it shows
is the noise of the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import io
import logging
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from onstep import CallbackManager, JsonLogger
from onstep.callbacks import TrackersCallback
from onstep.config import ConfigContainer, resolve
from onstep.data import TrainLoader, build_datasets, build_tokenizer
from onstep.models import build_transformer
from onstep.optim import build_optimizer
from onstep.recipes import tiny_gpt_pretrain_config
from onstep.record import read_records
from onstep.trackers import RunIdentity
from onstep.training import GlobalState, forward_step, train
from onstep.training.setup.setup import count_steps, resolve_vocabulary, scheduler_for
from step_times import StepTimes

LIMIT = 1.05


class Tracker:
    """One that takes every point at once; the others do something else with it."""

    name = "benchmark"
    keeps_names = False
    takes_back = False

    def __init__(self, on_point: Callable[[], None] = lambda: None) -> None:
        self._on_point = on_point

    def open(self, run: RunIdentity, state: Mapping[str, Any]) -> None:
        """Nothing to prepare."""

    def log(self, metrics: Mapping[str, float], step: int, timestamp: float) -> None:
        """What the row is named after."""
        self._on_point()

    def text(self, tag: str, text: str, step: int) -> None:
        """None come."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing to continue."""
        return {}

    def close(self, status: str) -> None:
        """Nothing to let go of."""


def fail() -> None:
    """A tracker without its server."""
    raise OSError("no route to host")


def end_thread() -> None:
    """A tracker that ends the thread it is called from."""
    raise SystemExit(1)


def wait_for(event: threading.Event) -> None:
    """A tracker that takes one point and never comes back."""
    event.wait()


def trackers() -> dict[str, Callable[[], TrackersCallback | None]]:
    """By name of the row: its trackers, made anew for each block."""
    never = threading.Event()
    return {
        "none": lambda: None,
        "accepts everything": lambda: TrackersCallback(Tracker()),
        "sleeps 10 s for each point": lambda: TrackersCallback(Tracker(lambda: time.sleep(10.0)), close_timeout=0.0),
        "raises for each point": lambda: TrackersCallback(Tracker(fail)),
        "never comes back": lambda: TrackersCallback(Tracker(functools.partial(wait_for, never)), close_timeout=0.0),
        "ends its thread": lambda: TrackersCallback(Tracker(end_thread)),
        "csv and tensorboard": lambda: TrackersCallback(["csv", "tensorboard"]),
    }


@dataclass
class Case:
    """A training of some milliseconds a step, and its data."""

    steps: int
    config: ConfigContainer
    dataset: Any

    def loader(self) -> TrainLoader:
        """The data from its beginning."""
        return TrainLoader(self.dataset, micro_batch_size=2, global_batch_size=2, seed=1)


def small_case(steps: int) -> Case:
    """A GPT of two layers on the demo's data."""
    config = tiny_gpt_pretrain_config()
    config.dist.device = "cpu"
    config.train.micro_batch_size = config.train.global_batch_size = 2
    config.model.hidden_size, config.model.num_layers = 64, 2
    config.model.seq_length = config.dataset.seq_length = 64
    config.train.train_iters, config.logger.log_interval = steps, 1
    config.scheduler.lr_warmup_iters = 0
    config.validation.eval_interval, config.validation.eval_on_start = None, False
    config = resolve(config, 1)
    tokenizer = build_tokenizer(config.tokenizer)
    resolve_vocabulary(config, tokenizer.vocab_size)
    return Case(steps, config, build_datasets(config.dataset, tokenizer, show_progress=False)[0])


def time_step(case: Case, trackers: TrackersCallback | None) -> float:
    """Median seconds a step of a training whose metrics log must be complete."""
    config = copy.deepcopy(case.config)
    state, model, loader = GlobalState(cfg=config), build_transformer(config.model, seed=1), case.loader()
    optimizer = build_optimizer([model], config.optimizer)
    scheduler = scheduler_for(config, optimizer, case.steps)
    manager, times = CallbackManager(), StepTimes()
    manager.add([times, JsonLogger(), *([] if trackers is None else [trackers])])
    count_steps(state, loader)
    with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(io.StringIO()):
        config.logger.logging_dir = directory
        train(forward_step, [model], optimizer, scheduler, loader, None, state, callback_manager=manager)
        records = read_records(Path(directory) / "trainer_logs.json")
    logged = [record["global_step"] for record in records if "loss" in record]
    assert logged == list(range(1, case.steps + 1)), "a record is missing from the metrics log"
    return times.median()


def main() -> None:
    """Print a row for each tracker."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--repetitions", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("onstep.trackers").setLevel(logging.ERROR)  # the one warning of each training is tested elsewhere
    case = small_case(arguments.steps)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in trackers()}
    for repetition in range(arguments.repetitions + 1):
        for name, make in trackers().items():
            pair = time_step(case, make()), time_step(case, None)
            if repetition:  # the first round warms up
                found[name].append(pair)
    print_rows(found)


def print_rows(found: Mapping[str, list[tuple[float, float]]]) -> None:
    """Milliseconds a step with and without the tracker, and the median ratio."""
    print(f"{'tracker':<28} {'with':>8} {'without':>8} {'ratio':>6}   limit {LIMIT}")
    for name, pairs in found.items():
        ours, bare = (1000 * statistics.median(column) for column in zip(*pairs, strict=True))
        ratio = statistics.median(one / other for one, other in pairs)
        print(f"{name:<28} {ours:5.2f} ms {bare:5.2f} ms {ratio:6.3f}   {'ok' if ratio <= LIMIT else 'TOO SLOW'}")


if __name__ == "__main__":
    main()
