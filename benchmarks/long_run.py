"""Whether a run of 100,000 steps with every log on stays as quick and as small as it began.

Run with `python benchmarks/long_run.py`: the trivial model through `Trainer`, every step logged to `log_history`, the
metrics log, csv and TensorBoard, a decision every 10 steps and a checkpoint after every tenth of the run. Prints time
and memory of each tenth, the size of its checkpoint and of the logs, and how long resumed runs took to start.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from onstep import Callback, Trainer, TrainingArguments
from onstep.callbacks import JsonLogger
from onstep.training.runs.signals import Preempted
from peer_models import Clock, workloads
from peer_rows import ReadyBatches, first, made
from steady import Marks, resident_mib

DECISION_INTERVAL = 10


class Decisions(Callback):
    """Requests something at every tenth step."""

    def on_step_end(self, context: Any) -> None:
        """Set the learning-rate factor to what it is."""
        if context.state.train_state.step % DECISION_INTERVAL == 0:
            context.control.set("lr_factor", 1.0, "for the benchmark")


class StopAt(Callback):
    """Preempts the run after a step, and notes when its first step began."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.started: float | None = None

    def on_step_begin(self, context: Any) -> None:
        """Note the time of the first."""
        if self.started is None:
            self.started = time.perf_counter()

    def on_step_end(self, context: Any) -> None:
        """Send the signal."""
        if context.state.train_state.step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


def bytes_of(path: Path) -> int:
    """Bytes of a file, or of all files in a directory."""
    return sum(one.stat().st_size for one in ([path] if path.is_file() else path.rglob("*")) if one.is_file())


def part(directory: str, steps: int, stop: int) -> None:
    """Train until step `stop` of a run of `steps`, from where the directory stands; prints what was seen as JSON."""
    workload = workloads()[0]
    clock = Clock(0, 10, now=float)
    model, optimizer = made(workload, clock)
    marks, stopping = Marks(max(1, stop // 10)), StopAt(stop)
    arguments = TrainingArguments(
        output_dir=directory,
        max_steps=steps + 1000,
        per_device_train_batch_size=1,
        logging_steps=1,
        save_steps=max(1, steps // 10),
        save_total_limit=2,
        report_to=["csv", "tensorboard"],
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    trainer = Trainer(
        model,
        arguments,
        data_collator=first,
        train_dataset=ReadyBatches(workload.batch, steps + 1000),
        callbacks=[JsonLogger(), Decisions(), marks, stopping],
        optimizers=(optimizer, None),
    )
    before = resident_mib()
    begin = time.perf_counter()
    with contextlib.suppress(SystemExit, Preempted):
        trainer.train(resume_from_checkpoint=True if os.listdir(directory) else None)
    assert stopping.started is not None
    print(
        "RESULT "
        + json.dumps(
            {
                "marks": marks.marks,
                "start": stopping.started - begin,
                "mib": [before, resident_mib()],
                "records": len(trainer.state.log_history),
            }
        )
    )


def run_part(directory: str, steps: int, stop: int) -> dict[str, Any]:
    """The same in a process of its own."""
    command = [sys.executable, __file__, "--part", directory, str(steps), str(stop)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise RuntimeError(f"the run failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(lines[0].removeprefix("RESULT "))
    return result


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--part", nargs=3, metavar=("DIRECTORY", "STEPS", "STOP"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.part:
        part(options.part[0], int(options.part[1]), int(options.part[2]))
        return 0
    rows = []
    for stop in (options.steps // 10, options.steps):
        with tempfile.TemporaryDirectory() as directory:
            whole = run_part(directory, options.steps, stop)
            sizes = {path.name: bytes_of(path) for path in sorted(Path(directory).iterdir())}
            resumed = [run_part(directory, options.steps, stop + 10 * (again + 1)) for again in range(3)]
        rows.append((stop, whole, sizes, resumed))
    _, whole, _, _ = rows[1]
    print(f"{'step':>8}{'us a step':>11}{'RSS MiB':>9}")
    for (before, begin, _), (step, end, mib) in zip(whole["marks"], whole["marks"][1:], strict=False):
        print(f"{step:>8}{(end - begin) / (step - before) * 1e6:>11.1f}{mib:>9.1f}")
    for stop, whole, sizes, resumed in rows:
        print(f"\nstopped at step {stop}: {whole['records']} records in log_history, memory {whole['mib']}")
        print("  " + ", ".join(f"{name} {size / 1e3:,.1f} kB" for name, size in sizes.items()))
        start = statistics.median(one["start"] for one in resumed)
        print(f"  started from scratch in {whole['start']:.2f} s, resumed in {start:.2f} s (median of 3)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
