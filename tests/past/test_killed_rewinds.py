"""Rewinds that are killed at any time, beside a live run, and of a Trainer's run on several ranks."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path

import pytest

from onstep import TrainerCallback
from tests.support.forked_processes import Processes, output_of
from tests.support.past_runs import content_of
from tests.support.planted_culprits import Case, as_settings, train, trainer_of

JOBS = "tests.support.jobs.culprit_jobs"
CASE = Case(5, "trainer", "label", 1, 0, 2, 0.1, packing=False, lora=False)
PRETRAINED = Case(5, "pretrain", "garbled", 1, 0, 1, 0.1, packing=False, lora=False)


def storm(processes: Processes, case: Case, directory: Path, kills: int) -> None:
    before = content_of(directory / "runs" / "x")
    chance = random.Random(1)
    for _ in range(kills):
        [child] = processes.start(JOBS, "again_and_again", directory, as_settings(case))
        time.sleep(chance.uniform(0.05, 3))
        child.send_signal(9)
        assert child.wait() == -9, output_of(directory)
        assert content_of(directory / "runs" / "x") == before
    [found] = processes.results(JOBS, "look", directory, as_settings(case), ranks=1)
    assert found["summary"].startswith("equal to the bit")


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_a_killed_rewind_of_a_trainers_run_changes_nothing(processes: Processes, tmp_path: Path, kills: int) -> None:
    train(CASE, tmp_path)
    storm(processes, CASE, tmp_path, kills)


@pytest.mark.slow
def test_a_killed_rewind_of_a_configured_run_changes_nothing(processes: Processes, tmp_path: Path) -> None:
    assert processes.run(JOBS, "base", tmp_path / "base", as_settings(PRETRAINED)) == [0], output_of(tmp_path / "base")
    case = replace(PRETRAINED, base=str(tmp_path / "base" / "runs" / "x"))
    train(case, tmp_path)
    storm(processes, case, tmp_path, 20)


class Looks(TrainerCallback):
    """Lets another process rewind the run that is training."""

    def __init__(self, processes: Processes, directory: Path) -> None:
        self._processes, self._directory = processes, directory
        self.summary, self.changed = "", True

    def on_step_end(self, args: object, state: object, control: object, **others: object) -> None:
        if getattr(state, "global_step", 0) == 40:
            before = content_of(self._directory / "runs" / "x")
            [found] = self._processes.results(JOBS, "look", self._directory, as_settings(CASE), ranks=1)
            self.summary, self.changed = found["summary"], content_of(self._directory / "runs" / "x") != before


def test_a_trainers_run_that_is_training_is_rewound(processes: Processes, tmp_path: Path) -> None:
    looks = Looks(processes, tmp_path)
    trainer = trainer_of(CASE, tmp_path)
    trainer.add_callback(looks)
    trainer.train()
    assert looks.summary.startswith("equal to the bit")
    assert not looks.changed


@pytest.mark.distributed
def test_two_ranks_are_repeated_to_the_bit_on_two_and_roughly_on_one(processes: Processes, tmp_path: Path) -> None:
    case = replace(CASE, ranks=2)
    assert processes.run(JOBS, "train", tmp_path, as_settings(case), ranks=2) == [0, 0], output_of(tmp_path)
    on_two, _ = processes.results(JOBS, "look", tmp_path, as_settings(case), ranks=2)
    [on_one] = processes.results(JOBS, "look", tmp_path, as_settings(case), ranks=1)
    assert on_two["summary"].startswith("equal to the bit")
    assert "not to the bit from step 31 on" in on_one["summary"]
    assert "the run had 2 ranks, this has 1" in on_one["summary"]
    assert on_two["num_samples"] == on_one["num_samples"] == 8
