"""A run that is killed three times and continued has each step once in the metrics log, the CSV file and
TensorBoard.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.support.forked_processes import Processes, output_of
from tests.support.tracker_files import metrics_log_values, scalars, table
from tests.support.whole_runs import Ranks

JOBS = "tests.support.jobs.killed_tracker_jobs"


@pytest.fixture(scope="module")
def runs(processes: Processes, tmp_path_factory: pytest.TempPathFactory, corpus: Path, token_cache: Path) -> Ranks:
    directory = tmp_path_factory.mktemp("runs")
    return Ranks(processes, directory, JOBS, corpus=str(corpus), cache=str(token_cache))


@pytest.fixture(scope="module")
def killed(runs: Ranks) -> Path:
    """The directory of a run that SIGKILL met just after a log, in an evaluation and just before a save."""
    strikes = [("on_step_end", 5), ("on_eval_step_end", 2), ("on_log", 5)]
    for event, number in strikes:
        codes = runs.start("killed", "train", ranks=1, event=event, number=number)
        assert codes == [-9], output_of(runs.directory / "killed")
    assert runs.start("killed", "train", ranks=1) == [0], output_of(runs.directory / "killed")
    assert json.loads((runs.directory / "killed" / "ended.json").read_text()) == {"ended": True}
    return runs.directory / "killed" / "runs" / "run"


def steps(points: list[tuple[int, float]]) -> list[int]:
    return [step for step, _ in points]


def test_the_metrics_log_has_each_step_once(killed: Path) -> None:
    assert steps(metrics_log_values(killed / "trainer_logs.json", "loss")) == list(range(1, 12))


def test_tensorboard_shows_what_the_metrics_log_has(killed: Path) -> None:
    shown = scalars(killed / "tensorboard")
    names = {"train/loss": "loss", "eval/loss": "eval_loss", "train/learning_rate": "learning_rate"}
    for tag, name in names.items():
        expected = metrics_log_values(killed / "trainer_logs.json", name)
        assert steps(shown[tag]) == steps(expected), tag
        assert [value for _, value in shown[tag]] == pytest.approx([value for _, value in expected], rel=1e-6), tag


def test_no_tag_has_two_points_at_a_step(killed: Path) -> None:
    for tag, points in scalars(killed / "tensorboard").items():
        assert len(set(steps(points))) == len(points), tag


def test_the_table_has_each_step_and_kind_once_with_the_metrics_logs_values(killed: Path) -> None:
    rows = table(killed / "metrics.csv")
    assert not rows.duplicated(["step", "kind"]).any()
    for kind, name in (("train", "loss"), ("eval", "eval_loss"), ("test", "test_loss")):
        found = rows[(rows.kind == kind) & rows[name].notna()]
        assert list(zip(found.step, found[name], strict=True)) == metrics_log_values(killed / "trainer_logs.json", name)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_kills_anywhere_leave_each_step_once(seed: int, runs: Ranks) -> None:
    chance = random.Random(seed)
    events = ["on_log", "on_step_end", "on_eval_end", "on_checkpoint_save", "on_train_step_start"]
    for _ in range(4):
        runs.start(f"storm-{seed}", "train", ranks=1, event=chance.choice(events), number=chance.randint(1, 5))
    assert runs.start(f"storm-{seed}", "train", ranks=1) == [0], output_of(runs.directory / f"storm-{seed}")
    run = runs.directory / f"storm-{seed}" / "runs" / "run"
    expected = metrics_log_values(run / "trainer_logs.json", "loss")
    assert steps(expected) == list(range(1, 12))
    shown = scalars(run / "tensorboard")["train/loss"]
    assert steps(shown) == steps(expected)
    assert [value for _, value in shown] == pytest.approx([value for _, value in expected], rel=1e-6)
    rows = table(run / "metrics.csv")
    assert not rows.duplicated(["step", "kind"]).any()
    found = rows[rows.kind == "train"]
    assert list(zip(found.step, found.loss, strict=True)) == expected
