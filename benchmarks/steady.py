"""Whether a long run with the default callbacks stays as quick and as small as it began, and when it reads the device.

Run with `make bench`: 20,000 steps of the trivial model through `Trainer`, logging every 10 steps. Prints time and
memory of each 2,000 steps, and how often, over other 200 steps, a value was read from a tensor between logged steps.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from onstep import Callback, Trainer, TrainingArguments
from peer_models import Clock, workloads
from peer_rows import LOG_INTERVAL, ReadyBatches, first, made, trainer_arguments
from silence import silence

OPERATORS = ("_local_scalar_dense", "item", "is_nonzero", "equal")
METHODS = ("tolist", "cpu")
"""What copies from a device; `numpy` cannot, it looks at the host's own memory, as the finite gate of the CPU does."""


def resident_mib() -> float:
    """Memory that this process occupies, in MiB; 0 where the system does not tell."""
    status = Path("/proc/self/status")
    if not status.exists():
        return 0.0
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) / 1024


class Marks(Callback):
    """Notes time and memory after every so many steps."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.marks: list[tuple[int, float, float]] = []
        """Step, seconds, MiB."""

    def on_step_end(self, context: Any) -> None:
        """Note them."""
        step = context.state.train_state.step
        if step % self.every == 0:
            self.marks.append((step, time.perf_counter(), resident_mib()))


class ReadCounter(TorchDispatchMode):
    """Counts what hands the host a tensor's values, by the step that is going on."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.step = 0
        self.reads: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.reads[self.step] += func.overloadpacket.__name__ in OPERATORS
        return func(*args, **(kwargs or {}))

    @contextlib.contextmanager
    def counting_methods(self) -> Iterator[None]:
        """Count the methods too, which on the CPU read without an operator."""

        def counted(method: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **options: Any) -> Any:
                self.reads[self.step] += 1
                return method(*args, **options)

            return call

        for name in METHODS:
            setattr(Tensor, name, counted(getattr(Tensor, name)))
        try:
            yield
        finally:
            for name in METHODS:
                delattr(Tensor, name)


class StepMarker(Callback):
    """Tells the counter which step is going on, from one `on_step_begin` to the next."""

    def __init__(self, counter: ReadCounter) -> None:
        self.counter = counter

    def on_step_begin(self, context: Any) -> None:
        """The next step."""
        self.counter.step = context.state.train_state.step + 1


def train(steps: int, callback: Callback) -> None:
    """A run of the trivial model with the default callbacks and one more."""
    workload = workloads()[0]
    clock = Clock(0, steps - 1, now=float)
    model, optimizer = made(workload, clock)
    with tempfile.TemporaryDirectory() as directory, silence():
        arguments = TrainingArguments(**trainer_arguments(clock, directory, clips=True, logs=True))
        data = ReadyBatches(workload.batch, steps)
        Trainer(
            model,
            arguments,
            data_collator=first,
            train_dataset=data,
            callbacks=[callback],
            optimizers=(optimizer, None),
        ).train()


def reads_by_kind(steps: int) -> tuple[int, int]:
    """Values read in the logged steps (and the last), and in all others."""
    with ReadCounter() as counter, counter.counting_methods():
        train(steps, StepMarker(counter))
    logged = sum(count for step, count in counter.reads.items() if step % LOG_INTERVAL == 0 and step > 0)
    others = sum(count for step, count in counter.reads.items() if step % LOG_INTERVAL and step > 0)
    return logged, others


def main() -> int:
    """Measure and print; 1 where the run read the device between logged steps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    block = options.steps // 10
    marks = Marks(block)
    train(options.steps, marks)
    print(f"{'step':>8}{'us a step':>11}{'RSS MiB':>9}")
    print(f"{marks.marks[0][0]:>8}{'':11}{marks.marks[0][2]:>9.1f}")
    times = []
    for (before, begin, _), (step, end, mib) in zip(marks.marks, marks.marks[1:], strict=False):
        times.append((end - begin) / (step - before) * 1e6)
        print(f"{step:>8}{times[-1]:>11.1f}{mib:>9.1f}")
    half = len(times) // 2
    early, late = statistics.median(times[:half]), statistics.median(times[half:])
    (first_step, _, first_mib), (last_step, _, last_mib) = marks.marks[0], marks.marks[-1]
    print(f"time: the second half takes {late / early:.3f} of the first half's")
    growth = f"{last_mib - first_mib:+.1f} MiB"
    print(f"memory: {first_mib:.1f} MiB at step {first_step}, {last_mib:.1f} MiB at step {last_step} ({growth})")
    logged, others = reads_by_kind(200)
    print(
        f"device reads in 200 steps: {logged} in {200 // LOG_INTERVAL} logged steps, {others} in all others (limit 0)"
    )
    return 1 if others else 0


if __name__ == "__main__":
    sys.exit(main())
