"""What a bad sample leads to is the same where the run is killed in between: skipped, or rolled back, once for all."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest

from onstep.cli.main import main
from onstep.record import read_records
from tests.support.forked_processes import Processes
from tests.support.whole_runs import Ranks, check_same, samples_of_epochs, taken

pytestmark = pytest.mark.distributed

NAN = math.nan
IN_ORDER = {"train_sampling_strategy": "sequential", "max_steps": 14, "logging_steps": 1}
"""Two whole epochs of six steps and two steps more; of two ranks, rank 1 reads rows 14 and 15 in step 2."""


@pytest.fixture(scope="module")
def ranks(processes: Processes, tmp_path_factory: pytest.TempPathFactory, corpus: Path, token_cache: Path) -> Ranks:
    return Ranks(processes, tmp_path_factory.mktemp("ranks"), corpus=str(corpus), cache=str(token_cache))


def settings_of(spoiled: dict[str, float], **overrides: Any) -> dict[str, Any]:
    return {"arguments": IN_ORDER, "spoiled": spoiled, "overrides": overrides}


SKIP = settings_of({"14": NAN}, **{"train.on_nonfinite": "skip"})
ROLLBACK = settings_of({"30": NAN}, **{"train.on_nonfinite": "rollback", "anomaly.rollback_lr_factor": 0.5})
SPIKE = settings_of({"30": 1e4}, **{"anomaly.on_spike": "rollback", "anomaly.spike_warmup": 2})


@pytest.fixture(scope="module")
def skipped(ranks: Ranks) -> dict[str, Any]:
    """The run that left the sample out and that nobody killed."""
    return ranks.finish("skipped", "trainer", **SKIP)


def metrics_log(ranks: Ranks, name: str) -> list[dict[str, Any]]:
    return read_records(ranks.directory / name / "runs" / "run" / "trainer_logs.json")


def result(ranks: Ranks, name: str, rank: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ranks.directory / name / f"result-{rank}.json").read_text())
    return found


def lines_of(ranks: Ranks, name: str) -> list[dict[str, Any]]:
    """What rank 0 took, step by step as it happened."""
    return [json.loads(line) for line in (ranks.directory / name / "taken-0.jsonl").read_text().splitlines()]


def test_a_poisoned_sample_on_rank_1_is_left_out_on_both_and_never_met_again(
    ranks: Ranks, skipped: dict[str, Any]
) -> None:
    for rank in range(2):
        found = result(ranks, "skipped", rank)
        assert (found["skip_list"], found["num_skips"], found["step"]) == ([[0, 14], [0, 15]], 1, 14)
    first, second, _ = samples_of_epochs(ranks.directory / "skipped").values()
    assert set(first) == set(range(44))
    assert set(second) == set(range(44)) - {14, 15}
    weights = [record["weights"] for record in skipped["certificates"][0]]
    unchanged = [step for step, (a, b) in enumerate(itertools.pairwise(weights), start=2) if a == b]
    assert unchanged == [2]
    assert all(isinstance(one, str) for one in weights), "the replicas are equal"


@pytest.mark.parametrize(
    ("event", "number", "rank"),
    [
        pytest.param("on_log", 2, 1, marks=pytest.mark.slow),
        ("on_train_step_end", 2, 1),
        ("on_step_end", 3, 0),
        pytest.param("on_step_end", 9, 1, marks=pytest.mark.slow),
    ],
)
def test_what_was_skipped_stays_skipped_after_a_kill(
    ranks: Ranks, skipped: dict[str, Any], event: str, number: int, rank: int
) -> None:
    name = f"skipped-{event}-{number}"
    dies = {"rank": rank, "signal": "SIGKILL", "event": event, "number": number}
    assert 0 not in ranks.start(name, "trainer", strikes=[dies], **SKIP)
    check_same(ranks.finish(name, "trainer", **SKIP), skipped)
    assert set(samples_of_epochs(ranks.directory / name)[1]) == set(range(44)) - {14, 15}


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("nan", 1),
        pytest.param("nan", 2, marks=pytest.mark.slow),
        pytest.param("spike", 1, marks=pytest.mark.slow),
        ("spike", 2),
    ],
)
@pytest.mark.slow
def test_a_rollback_goes_past_the_window_and_a_kill_after_it_changes_nothing(
    ranks: Ranks, kind: str, size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    settings, factor = (ROLLBACK, 0.5) if kind == "nan" else (SPIKE, 1.0)
    whole = f"{kind}-{size}"
    expected = ranks.finish(whole, "trainer", ranks=size, **settings)
    found = result(ranks, whole)
    assert (found["num_rollbacks"], found["overrides"].get("lr_factor", 1.0)) == (1, factor)

    records = metrics_log(ranks, whole)
    steps = [record["global_step"] for record in records if "learning_rate" in record]
    assert steps == list(range(1, 15)), "one clean curve"
    [rolled_back] = [record for record in records if "rolled_back_from" in record]
    assert (rolled_back["rolled_back_from"], rolled_back["global_step"]) == (4, 2)
    taken_in_order = [(record["step"], min(record["ids"])) for record in lines_of(ranks, whole)]
    assert taken_in_order[:6] == [(1, 0), (2, 8), (3, 16), (4, 24), (3, 32), (4, 40)]

    assert main(["why", str(ranks.directory / whole / "runs" / "run")]) == 0
    said = capsys.readouterr().out
    assert "rollback decided" in said
    assert "rolled back to step 2" in said

    for event, number in (("on_log", 5), ("on_step_end", 7), ("on_checkpoint_load", 1), ("on_step_end", 12)):
        name = f"{whole}-{event}-{number}"
        dies = {"rank": size - 1, "signal": "SIGKILL", "event": event, "number": number}
        assert 0 not in ranks.start(name, "trainer", ranks=size, strikes=[dies], **settings)
        check_same(ranks.finish(name, "trainer", ranks=size, **settings), expected)


def test_after_a_rollback_another_number_of_ranks_goes_on_behind_the_window(ranks: Ranks) -> None:
    overrides = {"train.on_nonfinite": "rollback", "checkpoint.certify": False}
    settings = {**settings_of({"30": NAN}, **overrides), "without_dropout": True}
    ranks.finish("behind-whole", "trainer", ranks=1, **settings)
    dies = {"rank": 0, "signal": "SIGKILL", "event": "on_step_end", "number": 7}  # 4 steps, back to 2, 3 steps
    assert 0 not in ranks.start("behind", "trainer", strikes=[dies], **settings)
    ranks.finish("behind", "trainer", ranks=1, **settings)
    expected = {record["step"]: record for record in lines_of(ranks, "behind-whole")}
    found = [record for record in lines_of(ranks, "behind") if record["attempt"] == 2]
    assert [record["step"] for record in found] == list(range(5, 15))
    for record in found:
        assert sorted(record["ids"]) == sorted(expected[record["step"]]["ids"])
        assert record["epoch"] == expected[record["step"]]["epoch"]
        assert record["loss"] == pytest.approx(expected[record["step"]]["loss"], rel=1e-5)


def test_more_rollbacks_than_allowed_end_the_run_and_name_them(ranks: Ranks) -> None:
    overrides = {"train.on_nonfinite": "rollback", "anomaly.max_rollbacks": 1}
    settings = settings_of({"30": NAN, "38": NAN}, **overrides)
    assert 0 not in ranks.start("too-many", "trainer", **settings)
    assert ranks.status("too-many") == "failed"
    assert "anomaly.max_rollbacks" in ranks.output("too-many")


@pytest.mark.parametrize("learns_late", [False, True])
def test_a_stop_saves_nothing_of_which_the_counters_may_be_ahead_of_the_weights(
    ranks: Ranks, learns_late: bool
) -> None:
    name = f"stop-{learns_late}"
    settings = settings_of({"22": NAN}, **{"train.on_nonfinite": "stop", "checkpoint.certify": False})
    assert ranks.start(name, "trainer", ranks=1, learns_late=learns_late, **settings) == [0], ranks.output(name)
    assert ranks.status(name) == "failed"
    assert max(taken(ranks.directory / name)) == 3
    assert ranks.steps(name) == [2]


@pytest.mark.parametrize("saves_at_end", [False, True])
def test_a_bad_step_that_the_host_learns_of_at_a_save_is_not_saved(ranks: Ranks, saves_at_end: bool) -> None:
    name = f"stop-at-save-{saves_at_end}"
    at_end = {"checkpoint.save_at_end": saves_at_end}
    overrides = {"train.on_nonfinite": "stop", "checkpoint.certify": False, **at_end}
    settings = settings_of({"22": NAN}, **overrides)
    settings["arguments"] = {**IN_ORDER, "logging_steps": 50}
    assert ranks.start(name, "trainer", ranks=1, learns_late=True, **settings) == [0]
    assert ranks.status(name) == "failed"
    assert max(taken(ranks.directory / name)) == 4, "known only where the save waits for the device"
    assert ranks.steps(name) == [2]
