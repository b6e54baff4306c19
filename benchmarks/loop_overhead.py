"""What the loop costs over bare PyTorch: the same steps in the same process, interleaved, medians.

Run with `make bench`. Each row repeats a block of steps of the plain loop and of Onstep's, alternately, and compares
the median time of a step. The micro model is one linear layer, so that its row shows the loop's own microseconds; the
ratio that users feel is the one on the tiny GPT.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onstep import CallbackManager, DefaultMetrics, InfoCallback, JsonLogger, ProgressCallback
from onstep.config import ConfigContainer, resolve
from onstep.data import StepBatches, TrainLoader, build_datasets, build_tokenizer
from onstep.events.manager import Listeners
from onstep.models import build_transformer
from onstep.optim import build_optimizer
from onstep.recipes import tiny_gpt_pretrain_config
from onstep.training import GlobalState, forward_step, train
from onstep.training.setup import count_steps, resolve_vocabulary, scheduler_for
from plain_loop import mean_loss, plain_loop

LR, MIN_LR, WARMUP, DECAY, BETAS, CLIP = 1e-3, 1e-4, 5, 0.1, (0.9, 0.95), 1.0


@dataclass
class Case:
    """A model with its data, made anew for each block."""

    name: str
    steps: int
    make_model: Callable[[], nn.Module]
    make_loader: Callable[[], Any]
    loss_of: Callable[[nn.Module, dict[str, Tensor]], Tensor]
    forward_step: Callable[..., Any]
    config: ConfigContainer


class RepeatingLoader:
    """The same micro-batch for ever, at no cost: leaves the loop's own time."""

    epoch = 0
    samples_in_epoch = 0
    num_samples = None

    def __init__(self, batch: dict[str, Tensor]) -> None:
        rows = next(iter(batch.values())).shape[0]
        self._step = StepBatches([batch], None, rows, [False])

    def read(self, num_microbatches: int) -> StepBatches:
        """The step."""
        return self._step

    def steps_per_epoch(self, num_microbatches: int) -> None:
        """It has no length."""
        return

    def seek(self, epoch: int, samples_in_epoch: int) -> None:
        """Every position is the same."""


def tiny_gpt(steps: int) -> Case:
    """The demo's model on its data."""
    config = tiny_gpt_pretrain_config()
    config.dist.device = "cpu"
    config = resolve(config, 1)
    tokenizer = build_tokenizer(config.tokenizer)
    resolve_vocabulary(config, tokenizer.vocab_size)
    dataset, _, _ = build_datasets(config.dataset, tokenizer, show_progress=False)
    size = config.train.global_batch_size
    assert size is not None

    def make_loader() -> TrainLoader:
        return TrainLoader(dataset, micro_batch_size=size, global_batch_size=size, seed=1)

    return Case(
        "tiny GPT", steps, lambda: build_transformer(config.model, seed=1), make_loader, mean_loss, forward_step, config
    )


def micro_model(steps: int) -> Case:
    """One linear layer: the step is nearly nothing but the loop."""
    config = resolve(tiny_gpt_pretrain_config(), 1)
    torch.manual_seed(0)
    batch = {"x": torch.randn(16, 16), "labels": torch.randint(16, (16, 1))}

    def loss_sum(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch["x"]), batch["labels"].squeeze(1), reduction="sum")

    def step(data_iterator: Any, model: nn.Module) -> Any:
        batch = next(data_iterator)
        return loss_sum(model, batch), lambda loss: (loss, 16, {})

    return Case(
        "micro model",
        steps,
        lambda: nn.Linear(16, 16),
        lambda: RepeatingLoader(batch),
        lambda model, batch: loss_sum(model, batch) / 16,
        step,
        config,
    )


def time_plain(case: Case) -> float:
    """Seconds a step of the plain loop."""
    model, loader = case.make_model(), case.make_loader()
    options: dict[str, Any] = {
        "lr": LR,
        "min_lr": MIN_LR,
        "warmup": WARMUP,
        "weight_decay": DECAY,
        "betas": BETAS,
        "clip": CLIP,
        "loss_of": case.loss_of,
    }
    start = time.perf_counter()
    plain_loop(model, loader, steps=case.steps, **options)
    return (time.perf_counter() - start) / case.steps


def time_onstep(case: Case, callbacks: list[Any], log_interval: int, folder: str) -> float:
    """Seconds a step of `onstep.training.train` with the same optimizer, clip, schedule and batches."""
    config = copy.deepcopy(case.config)
    config.train.train_iters = case.steps
    config.optimizer.lr, config.optimizer.min_lr = LR, MIN_LR
    config.optimizer.weight_decay, config.optimizer.clip_grad = DECAY, CLIP
    config.scheduler.lr_warmup_iters, config.scheduler.lr_decay_style = WARMUP, "cosine"
    config.validation.eval_interval, config.validation.eval_on_start = None, False
    config.logger.log_interval, config.logger.logging_dir = log_interval, folder
    state = GlobalState(cfg=config)
    model, loader = case.make_model(), case.make_loader()
    optimizer = build_optimizer([model], config.optimizer)
    scheduler = scheduler_for(config, optimizer, case.steps)
    manager = CallbackManager()
    manager.add(callbacks)
    count_steps(state, loader)
    start = time.perf_counter()
    train(case.forward_step, [model], optimizer, scheduler, loader, None, state, callback_manager=manager)
    return (time.perf_counter() - start) / case.steps


def compare(case: Case, make_callbacks: Callable[[], list[Any]], log_interval: int, repetitions: int) -> list[float]:
    """Median seconds a step: plain, Onstep; then their difference and ratio."""
    plain: list[float] = []
    ours: list[float] = []
    for repetition in range(repetitions + 1):
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            for is_plain in (True, False) if repetition % 2 else (False, True):
                if is_plain:
                    plain.append(time_plain(case))
                else:
                    ours.append(time_onstep(case, make_callbacks(), log_interval, folder))
    plain, ours = plain[1:], ours[1:]  # the first block warms up
    typical_plain, typical_ours = statistics.median(plain), statistics.median(ours)
    return [typical_plain, typical_ours, typical_ours - typical_plain, typical_ours / typical_plain]


def default_callbacks() -> list[Any]:
    """What `onstep train` registers, with rows instead of a bar, written nowhere."""
    return [
        DefaultMetrics(),
        ProgressCallback(use_tqdm=False, output_stream=io.StringIO()),
        InfoCallback(),
        JsonLogger(),
    ]


def unheard_event_ns() -> float:
    """Nanoseconds of the test that an event without listeners costs."""
    on, count = Listeners(), 1_000_000
    empty = min(_timed(lambda: _loop_empty(count)) for _ in range(5))
    tested = min(_timed(lambda: _loop_testing(on, count)) for _ in range(5))
    return (tested - empty) / count * 1e9


def _timed(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _loop_empty(count: int) -> None:
    for _ in range(count):
        pass


def _loop_testing(on: Listeners, count: int) -> None:
    for _ in range(count):
        if on.on_step_end:
            raise AssertionError("nobody listens")


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--gpt-steps", type=int, default=20)
    parser.add_argument("--micro-steps", type=int, default=2000)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    gpt, micro = tiny_gpt(options.gpt_steps), micro_model(options.micro_steps)
    print(
        f"torch {torch.__version__}, {options.threads} threads, {options.repetitions} interleaved repetitions, medians"
    )
    print(f"{'case':<46}{'plain ms':>10}{'onstep ms':>11}{'over us':>9}{'ratio':>8}  limit")
    rows: list[tuple[str, Case, Callable[[], list[Any]], int, str]] = [
        ("micro model, no callbacks", micro, list, 0, "15 us"),
        ("tiny GPT, no callbacks", gpt, list, 0, "1.01"),
        ("tiny GPT, default callbacks, log every 10", gpt, default_callbacks, 10, "1.02"),
    ]
    for name, case, make_callbacks, log_interval, limit in rows:
        plain, ours, over, ratio = compare(case, make_callbacks, log_interval, options.repetitions)
        print(f"{name:<46}{plain * 1e3:>10.3f}{ours * 1e3:>11.3f}{over * 1e6:>9.1f}{ratio:>8.4f}  {limit}")
    print(f"{'an event that nobody listens to':<46}{'':>21}{unheard_event_ns():>6.1f} ns{'':>8}  100 ns")
    print(f"files: {Path(__file__).name}, plain_loop.py")


if __name__ == "__main__":
    main()
