"""Runs unmodified scripts under `transformers` and under `onstep run` by turns, and prints how they differ.

    python -m tests.brought.compare [names] [--turns 3] [--kills]

With `--kills`, each is killed twice by SIGKILL at random instants, started again by the same command, and compared to
the bit with its uninterrupted run under `onstep run`.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.brought import materials
from tests.brought.outcomes import Difference, Outcome, compare, is_same
from tests.brought.programs import DOORS, Program
from tests.brought.running import Failed, run, run_killed
from tests.brought.script_programs import PROGRAMS as SCRIPTS
from tests.brought.trl_programs import PROGRAMS as TRL

PROGRAMS: list[Program] = [*TRL, *SCRIPTS]
HEADER = (
    f"{'program':<22}{'records':>10}{'weights':>10}{'files':>8}"
    f"{'training s':>18}{'ratio':>7}{'whole s':>18}{'ratio':>7}  after 2 kills"
)


@dataclass
class Row:
    """The comparison of a program: its seconds by door, in each turn."""

    program: Program
    difference: Difference | None = None
    trained: dict[str, list[float]] = field(default_factory=lambda: {door: [] for door in DOORS})
    whole: dict[str, list[float]] = field(default_factory=lambda: {door: [] for door in DOORS})
    killed: str = "-"
    error: str = ""

    def failures(self) -> list[str]:
        """What does not hold, a line for each."""
        found = [self.error] if self.error else []
        if self.difference is not None:
            if not self.difference.largest <= self.program.tolerance:
                found.append(f"differs by {self.difference.records} in records, {self.difference.weights} in weights")
            if self.difference.missing:
                found.append(f"lacks {', '.join(self.difference.missing)}")
        if self.killed not in ("-", "equal"):
            found.append(f"after kills: {self.killed}")
        return found

    def line(self) -> str:
        """The row of the table."""
        if self.difference is None:
            return f"{self.program.name:<22} failed"
        missing = len(self.difference.missing)
        return (
            f"{self.program.name:<22}{self.difference.records[0]:>10.1e}{self.difference.weights:>10.1e}"
            f"{f'{missing} lack' if missing else 'same':>8}{_shown(self.trained)}{_shown(self.whole)}"
            f"  {self.killed[:60]}"
        )


def measure(program: Program, here: Path, outputs: Path, *, turns: int = 1, kills: int = 0, seed: int = 0) -> Row:
    """Run a program by turns under both, and compare the last two."""
    row = Row(program)
    try:
        for turn in range(turns):
            outcomes = {door: run(program, door, here, outputs / f"{door}-{turn}") for door in DOORS}
            for door, outcome in outcomes.items():
                row.whole[door].append(outcome.seconds)
                row.trained[door].append(outcome.summary().get("train_runtime", float("nan")))
        row.difference = compare(outcomes["transformers"], outcomes["onstep"])
        if kills:
            row.killed = _killed(program, here, outputs / "killed", outcomes["onstep"], random.Random(seed), kills)
    except Failed as failed:
        row.error = str(failed)
    return row


def ratio(seconds: dict[str, list[float]]) -> float:
    """The median time under `onstep run` divided by that of transformers."""
    return statistics.median(seconds["onstep"]) / statistics.median(seconds["transformers"])


def summary(rows: list[Row]) -> str:
    """The medians over the programs that ran."""
    ran = [row for row in rows if row.difference is not None]
    if not ran:
        return "nothing ran"
    trained, whole = (statistics.median(ratio(getattr(row, name)) for row in ran) for name in ("trained", "whole"))
    return f"{len(ran)} of {len(rows)} ran; median of ratios: training {trained:.2f}, whole process {whole:.2f}"


def _killed(program: Program, here: Path, output: Path, whole: Outcome, source: random.Random, kills: int) -> str:
    ended, reached = run_killed(program, here, output, whole, source, kills)
    unequal = is_same(whole, ended)
    return f"{len(unequal)} unequal, first {unequal[0]} (killed at records {reached})" if unequal else "equal"


def _shown(seconds: dict[str, list[float]]) -> str:
    one, other = (statistics.median(seconds[door]) for door in DOORS)
    return f"{f'{one:.2f} / {other:.2f}':>18}{ratio(seconds):>7.2f}"


def chosen(names: list[str]) -> list[Program]:
    """The programs whose names begin with one of these, or all; without those whose packages are not installed."""
    found = [one for one in PROGRAMS if not names or any(one.name.startswith(name) for name in names)]
    return [one for one in found if all(importlib.util.find_spec(package) for package in one.needs)]


def main() -> int:
    """Print the table; the exit code is 1 if a program differs or fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="beginnings of names; all programs without any")
    parser.add_argument("--turns", type=int, default=1, help="how often each runs under both")
    parser.add_argument("--kills", nargs="?", type=int, const=2, default=0, help="kills of a further run")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the instants of the kills")
    parser.add_argument("--keep", type=Path, help="a directory in which all outputs stay")
    given = parser.parse_args()
    if unknown := [name for name in given.names if not chosen([name])]:
        parser.error(f"no program that can run begins with {unknown}; known: {', '.join(p.name for p in PROGRAMS)}")
    with tempfile.TemporaryDirectory() as temporary:
        root = given.keep or Path(temporary)
        here = root / "materials"
        if not here.exists():
            materials.make(here)
        print(f"seconds are those of transformers / onstep; seed {given.seed}\n{HEADER}", flush=True)
        rows = []
        for program in chosen(given.names):
            outputs = root / f"{program.name}-{time.time_ns()}"
            row = measure(program, here, outputs, turns=given.turns, kills=given.kills, seed=given.seed)
            rows.append(row)
            print("\n  ".join([row.line(), *row.failures()]), flush=True)
        print(summary(rows))
    return 1 if any(row.failures() for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
