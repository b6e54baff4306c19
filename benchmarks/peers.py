"""The loop's price beside those of PyTorch alone, Hugging Face's Trainer, Lightning, Fabric, Accelerate and Ignite.

Run with `make bench-peers`, which makes an environment that has them all; a framework that is missing is shown as not
installed. The method:

- One process, one thread, the CPU. Every row trains the same model on the same batch with fused AdamW; `peer_rows.py`
  shows how, and what a quiet and a comparable row do.
- A block is a new run. The clock is in the model's forward pass and starts after the warm-up steps, so set-up is not
  counted. A block's time is the median over windows of ten steps (see `peer_models.Clock`).
- In each round every row runs one block, and beside it, before or after by turns, a block of its bare row: rows that
  clip and have a schedule are compared with the bare loop that does. Each round begins at another row.
- `step us` and `IQR us` are the median and the interquartile range of a row's blocks. `ratio` and `over us` are the
  medians of its time over, and less, that of the bare block beside it.
- `outside us` is the time outside forward, backward and optimizer step, over bare: the time in forward and in torch's
  backward engine is measured in both blocks and taken off. The optimizer steps of both cancel out; where a framework
  steps quicker or slower than `torch.optim.AdamW.step`, that shows.

`--clock cpu` counts the processor time of all threads instead of seconds, for a machine that is busy with other things.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import logging
import os
import pstats
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

import onstep
from peer_models import Clock, Workload, workloads
from peer_rows import BARE, BARE_CLIPPING, COMPARABLE, QUIET, Row, onstep_train, onstep_trainer
from silence import silence

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
PACKAGES = {"transformers", "accelerate", "lightning", "ignite"}
MAX_RATIO = {
    "onstep train(), quiet": 1.00,
    "onstep train(), clip + schedule": 0.85,
    "onstep Trainer, quiet": 1.05,
    "onstep Trainer, clip + schedule": 1.05,
    "onstep Trainer, defaults": 1.15,
    "onstep Trainer, five callbacks": 1.10,
}
"""Limits of the trivial model."""
MAX_OUTSIDE_US = {
    "onstep train(), quiet": 60.0,
    "onstep train(), clip + schedule": 60.0,
    "onstep Trainer, quiet": 100.0,
    "onstep Trainer, clip + schedule": 100.0,
    "onstep Trainer, defaults": 150.0,
}
"""Limits of the GPT."""


Times = tuple[float, float]
"""Seconds of a step, and of what is neither its forward nor its backward pass."""


@dataclass
class Figures:
    """A row of the table, in microseconds a step."""

    step: float
    iqr: float
    ratio: float
    over: float
    outside: float


def figures(blocks: list[Times], bare: list[Times]) -> Figures:
    """Medians over a row's blocks, each compared with the bare block beside it."""
    steps = [step for step, _ in blocks]
    pairs = list(zip(blocks, bare, strict=True))
    quartiles = statistics.quantiles(steps, n=4)
    return Figures(
        step=statistics.median(steps) * 1e6,
        iqr=(quartiles[2] - quartiles[0]) * 1e6,
        ratio=statistics.median(one[0] / other[0] for one, other in pairs),
        over=statistics.median(one[0] - other[0] for one, other in pairs) * 1e6,
        outside=statistics.median(one[1] - other[1] for one, other in pairs) * 1e6,
    )


def run_block(row: Row, workload: Workload, clock: Clock) -> Times:
    """Train a new model with `row`."""
    gc.collect()
    with tempfile.TemporaryDirectory() as directory, silence(), clock.timing_backward():
        row(workload, clock, directory)
    return clock.times()


def installed(rows: dict[str, Row], workload: Workload) -> dict[str, Row]:
    """The rows whose packages are there, each run once for a few steps, so that its first block is like the others."""
    found = {}
    for name, row in rows.items():
        try:
            run_block(row, workload, Clock(2, 10))
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] not in PACKAGES:
                raise
        else:
            found[name] = row
    return found


def measure(rows: dict[str, Row], workload: Workload, rounds: int, now: Callable[[], float]) -> dict[str, Figures]:
    """All rows, interleaved: each round begins at another row, and beside each block runs one of its bare row."""

    def block(row: Row) -> Times:
        return run_block(row, workload, Clock(workload.warmup, workload.steps, now))

    bare_of = {name: base for group, base in ((QUIET, BARE), (COMPARABLE, BARE_CLIPPING)) for name in group}
    names = [name for name in rows if name not in (BARE, BARE_CLIPPING)]
    blocks: dict[str, list[Times]] = defaultdict(list)
    beside: dict[str, list[Times]] = defaultdict(list)
    for index in range(rounds):
        turn = index * len(names) // rounds
        for name in names[turn:] + names[:turn]:
            base = bare_of[name]
            if index % 2:
                blocks[name].append(block(rows[name]))
            beside[name].append(block(rows[base]))
            if not index % 2:
                blocks[name].append(block(rows[name]))
            blocks[base].append(beside[name][-1])
    return {name: figures(measured, beside.get(name, measured)) for name, measured in blocks.items()}


def verdict(name: str, table: dict[str, Figures], *, is_trivial: bool) -> str:
    """An Onstep row beside its limit, and the peers that it is behind."""

    def figure(row: str) -> float:
        return table[row].ratio if is_trivial else table[row].outside

    limit = (MAX_RATIO if is_trivial else MAX_OUTSIDE_US).get(name)
    said = ""
    if limit is not None:
        shown = f"<= {limit:.2f}" if is_trivial else f"<= +{limit:.0f} us"
        said = f"{shown} {'ok' if figure(name) <= limit else 'MISSED'}; "
    peers = [row for row in table if not row.startswith(("onstep", "bare"))]
    ahead = [row.partition(",")[0] for row in peers if figure(row) <= figure(name)]
    return said + (f"BEHIND {', '.join(ahead)}" if ahead else f"ahead of all {len(peers)} peers")


def print_table(workload: Workload, measured: dict[str, Figures], *, is_trivial: bool) -> None:
    """Both groups of rows, each with its bare row first."""
    print(f"\n{workload.name}, blocks of {workload.steps} steps")
    print(f"{'':36}{'step us':>9}{'IQR us':>8}{'ratio':>8}{'over us':>9}{'outside us':>12}")
    for rows in (QUIET, COMPARABLE):
        table = {name: measured[name] for name in rows if name in measured}
        for name in rows:
            if name not in table:
                print(f"{name:36}not installed")
                continue
            row = table[name]
            said = verdict(name, table, is_trivial=is_trivial) if name.startswith("onstep") else ""
            shown = f"{row.step:9.1f}{row.iqr:8.1f}{row.ratio:8.3f}{row.over:9.1f}{row.outside:12.1f}"
            print(f"{name:36}{shown}  {said}".rstrip())


def print_profile(row: Row, workload: Workload) -> None:
    """What a quiet step calls in Onstep: by file, then by function with its line; the profiler adds to all times."""
    profile = cProfile.Profile()
    clock = Clock(workload.warmup, 200, on_start=profile.enable, on_end=profile.disable)
    run_block(row, workload, clock)
    root = str(Path(onstep.__file__).parent) + os.sep
    functions = []
    by_file: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for (path, line, function), (_, calls, own, _, _) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        if path.startswith(root):
            name = path.removeprefix(root)
            functions.append((own / clock.steps * 1e6, calls / clock.steps, f"{name}:{line} {function}"))
            by_file[name][0] += own / clock.steps * 1e6
            by_file[name][1] += calls / clock.steps
    print(f"{workload.name}: {sum(calls for _, calls, _ in functions):.1f} calls a step in {len(by_file)} files")
    print(f"{'own us':>9}{'calls':>9}  (a step)")
    for name, (own, calls) in sorted(by_file.items(), key=lambda item: -item[1][0]):
        print(f"{own:9.2f}{calls:9.2f}  {name}")
    print()
    for own, calls, name in sorted(functions, reverse=True):
        print(f"{own:9.2f}{calls:9.2f}  {name}")


def main() -> None:
    """Measure and print the tables, or the profile of a row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, help="blocks of each row (default 20)")
    parser.add_argument("--quick", action="store_true", help="three rounds of shorter blocks: under a minute")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--profile", choices=["onstep-train", "onstep-trainer"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    logging.disable(logging.WARNING)
    trivial, gpt = workloads()
    if options.profile is not None:
        print_profile(onstep_train if options.profile == "onstep-train" else onstep_trainer, trivial)
        return
    rounds = options.rounds or (3 if options.quick else 20)
    if options.quick:
        trivial.steps, gpt.steps = 100, 10
    print(f"torch {torch.__version__}, one thread, {rounds} interleaved rounds, medians, {options.clock} clock")
    begin = time.perf_counter()
    rows = installed(QUIET | COMPARABLE, trivial)
    gc.freeze()  # the collector passes over all that the imports made
    for workload in (trivial, gpt):
        print_table(workload, measure(rows, workload, rounds, CLOCKS[options.clock]), is_trivial=workload is trivial)
    print(f"\nmeasured in {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
