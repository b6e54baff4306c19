"""What reading a long log costs: summary and plot of a million records, as a user starts them.

Writes a metrics log as a run leaves one (a record a step, an evaluation every thousand), then runs `onstep logs ...` on
it in a process of its own, and prints wall and processor seconds and the peak memory beside the limits. Exit code 1
where a limit is passed. Processor seconds tell more than wall seconds where other work shares the machine.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

GIGABYTE = 1e9
PEAK_LIMIT = 1 * GIGABYTE


@dataclass(frozen=True)
class Task:
    """A command with its limit."""

    name: str
    words: Sequence[str]
    limit_seconds: float | None


@dataclass(frozen=True)
class Cost:
    """What one child process took."""

    wall_seconds: float
    processor_seconds: float
    peak_bytes: int


def write_metrics_log(path: Path, num_records: int) -> None:
    """A metrics log of a run with noisy, falling losses; the same bytes each time."""
    noise = random.Random(0)
    with path.open("w", encoding="ascii") as file:
        file.write("[")
        for step in range(num_records):
            file.write((",\n" if step else "\n") + json.dumps(record(step, noise)))
        file.write("\n]")


def record(step: int, noise: random.Random) -> dict[str, object]:
    """An evaluation at each thousandth step, else a logged step."""
    head = {"timestamp": 1_790_000_000.25 + 0.173 * step, "global_step": step, "epoch": step / 125_000}
    loss = 2.0 + 8.0 / math.sqrt(1 + step / 100) + noise.gauss(0, 0.05)
    if step % 1000 == 999:
        return {**head, "eval_loss": loss, "eval_perplexity": math.exp(loss), "eval_runtime": 0.5}
    grad_norm = abs(noise.gauss(1, 0.2))
    return {
        **head,
        "loss": loss,
        "grad_norm": grad_norm,
        "max_grad_norm": grad_norm,
        "tokens": 1024,
        "total_tokens": 1024 * (step + 1),
        "total_flos": 151781376.0 * (step + 1),
        "learning_rate": 3e-4 * (1 + math.cos(step / 1e6 * math.pi)) / 2,
        "tok_per_sec": 71976 + step % 1000,
    }


def cost_of(words: Sequence[str], directory: Path) -> Cost:
    """Run `onstep` with the words, and see what it took."""
    started = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "onstep", *words], cwd=directory, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"onstep {' '.join(words)} ended with {process.returncode}")
    wall = time.perf_counter() - started
    return Cost(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def report(task: Task, cost: Cost) -> bool:
    """Print a line; whether the limits hold."""
    is_kept = cost.peak_bytes < PEAK_LIMIT and (task.limit_seconds is None or cost.wall_seconds < task.limit_seconds)
    limit = "-" if task.limit_seconds is None else f"{task.limit_seconds:.0f}"
    print(
        f"{task.name:<16} {cost.wall_seconds:8.2f} {limit:>6} {cost.processor_seconds:10.2f} "
        f"{cost.peak_bytes / GIGABYTE:8.2f} {PEAK_LIMIT / GIGABYTE:6.0f}   {'ok' if is_kept else 'TOO MUCH'}"
    )
    return is_kept


def main() -> int:
    """Measure each command in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--records", type=int, default=1_000_000, help="length of the metrics log; the limits are for 1e6"
    )
    parser.add_argument("--exports", action="store_true", help="measure CSV and Parquet too")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_metrics_log(directory / "log.json", arguments.records)
        size = (directory / "log.json").stat().st_size / 1e6
        print(f"{arguments.records:,} records, {size:.0f} MB; load of the machine before: {os.getloadavg()[0]:.1f}")
        print(f"{'':<16} {'wall s':>8} {'limit':>6} {'processor s':>10} {'peak GB':>7} {'limit':>6}")
        tasks = [
            Task("logs summary", ["logs", "summary", "log.json"], 5.0),
            Task("logs plot", ["logs", "plot", "log.json", "--output", "curves.png"], 8.0),
        ]
        if arguments.exports:
            tasks += [
                Task("export csv", ["logs", "summary", "log.json", "--export", "log.csv"], None),
                Task("export parquet", ["logs", "summary", "log.json", "--export", "log.parquet"], None),
            ]
        kept = [report(task, cost_of(task.words, directory)) for task in tasks]
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
