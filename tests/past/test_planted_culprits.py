"""A planted culprit is the first sample of its step, and the repeated steps are equal to the record to the bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked_processes import Processes, output_of
from tests.support.past_runs import content_of
from tests.support.planted_culprits import Case, as_settings, case_of

JOBS = "tests.support.jobs.culprit_jobs"
SEEDS = [1000 + 37 * number for number in range(40)]


Bases = Callable[[str], str]


@pytest.fixture(scope="module")
def base_of(processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> Bases:
    """Gives the run of a kind that knows what the data is like."""

    @cache
    def trained(kind: str) -> str:
        directory = tmp_path_factory.mktemp(kind)
        case = Case(1, "pretrain", kind, 1, 0, 2, 0.0, packing=kind == "answer", lora=False)
        assert processes.run(JOBS, "base", directory, as_settings(case)) == [0], output_of(directory)
        return str(directory / "runs" / "x")

    return lambda kind: trained("answer" if kind == "answer" else "garbled")


def found_in(processes: Processes, case: Case, directory: Path) -> dict[str, Any]:
    """Train the run of a case, and rewind it in other processes."""
    settings = as_settings(case)
    assert processes.run(JOBS, "train", directory, settings, ranks=case.ranks) == [0] * case.ranks, output_of(directory)
    before = content_of(directory / "runs" / "x")
    found: dict[str, Any] = processes.results(JOBS, "find", directory, settings, ranks=case.ranks)[0]
    assert content_of(directory / "runs" / "x") == before
    return found


def check(processes: Processes, base_of: Bases, number: int, directory: Path) -> None:
    case = case_of(number, SEEDS[number])
    case = replace(case, base=base_of(case.kind)) if case.door == "pretrain" else case
    found = found_in(processes, case, directory)
    is_first = found["by_unusual"] if case.kind == "duplicate" else found["by_share"] or found["by_gradient"]
    firsts = ", ".join(one for one in ("share", "gradient", "unusual") if found[f"by_{one}"])
    print(f"{case.name} | step {found['step']}, {found['samples']} samples | first by {firsts} | {found['summary']}")
    assert found["summary"].startswith("equal to the bit"), (case.name, found)
    assert is_first, (case.name, found)


@pytest.mark.parametrize("number", [0, 1, 3, 4])
@pytest.mark.slow
def test_a_planted_culprit_is_first(processes: Processes, base_of: Bases, tmp_path: Path, number: int) -> None:
    check(processes, base_of, number, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(40))
def test_planted_culprits_of_random_seeds_are_first(
    processes: Processes, base_of: Bases, tmp_path: Path, number: int
) -> None:
    check(processes, base_of, number, tmp_path)
