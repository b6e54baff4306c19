"""Norms over real ranks, and what the norm loggers of a run leave that is killed again and again."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from onstep.record import read_records, without_wall_clock
from tests.support.forked_processes import Processes
from tests.support.whole_runs import Ranks, check_same

pytestmark = pytest.mark.distributed

JOBS = "tests.support.jobs.norm_jobs"
FILES = ("gradient_norms.json", "parameter_norms.json")


@pytest.fixture(scope="module")
def runs(processes: Processes, tmp_path_factory: pytest.TempPathFactory, corpus: Path, token_cache: Path) -> Ranks:
    processes.load("torch.distributed.fsdp", "torch.distributed.tensor")
    return Ranks(processes, tmp_path_factory.mktemp("runs"), JOBS, corpus=str(corpus), cache=str(token_cache))


def results(runs: Ranks, job: str) -> list[dict[str, Any]]:
    codes = runs.start(job, job, ranks=2)
    assert codes == [0, 0], runs.output(job)
    return [json.loads((runs.directory / job / f"rank-{rank}.json").read_text()) for rank in range(2)]


def records(runs: Ranks, name: str, file: str) -> list[dict[str, Any]]:
    return [without_wall_clock(one) for one in read_records(runs.directory / name / "runs" / "run" / file)]


def test_norms_of_an_fsdp_model_are_those_of_the_whole_one(runs: Ranks) -> None:
    for result in results(runs, "sharded_norms"):
        assert result["sharded"] == pytest.approx(result["plain"], rel=1e-12)
        assert list(result["sharded"]) == list(result["plain"])
        assert result["sharded_grad"] == pytest.approx(result["plain_grad"], rel=1e-5)
        assert result["report"] == pytest.approx(math.hypot(*result["plain_grad"].values()), rel=1e-5)
        assert result["gathered"] == "Parameter of torch.bfloat16", "else the next lines show nothing"
        assert result["after_evaluation"] == result["sharded"]
        assert result["sharded_spectral"] == pytest.approx(result["plain_spectral"], rel=1e-6)
        assert result["spectral_after_evaluation"] == result["sharded_spectral"]
        assert result["again"] == pytest.approx(result["plain_spectral"], rel=0.01)


def test_tensors_split_every_way(runs: Ranks) -> None:
    one, other = results(runs, "dtensors")
    assert {**one, "bad": None} == {**other, "bad": None}, "every rank gets the whole norms"
    assert one["norms"] == pytest.approx(one["exact"], rel=1e-12)
    assert one["norms"]["partial"] == pytest.approx(6.0)
    of_first_rank = {"both": math.sqrt(18)}
    summed = {name: 2 * math.sqrt(30) for name in ("columns", "replicated")}
    assert one["gradients"] == pytest.approx(summed | of_first_rank)
    for name, value in one["decomposed"].items():
        assert one["spectral"][name] == pytest.approx(value, rel=0.01), name
    assert one["spectral"]["plain"] == 2.0
    assert one["bad"] == other["bad"] == ["nan"] * 4, "also of a vector, as in one process"


def test_loggers_of_an_fsdp_run_record_whole_norms(runs: Ranks) -> None:
    result, other = results(runs, "sharded_run")
    logs = runs.directory / "sharded_run" / "logs"
    gradients, parameters = (read_records(logs / file) for file in FILES)
    assert [one["global_step"] for one in gradients] == [one["global_step"] for one in parameters] == [2, 4]
    for expected, gradient, parameter in zip(result["expected"], gradients, parameters, strict=True):
        assert gradient["grad_norms"] == pytest.approx(expected["grad_norms"], rel=1e-6)
        assert parameter["norms"] == pytest.approx(expected["norms"], rel=1e-6)
        assert parameter["spectral_norms"].keys() == expected["norms"].keys()
    assert result["logged"] == other["logged"]
    assert result["logged"][1::2] == pytest.approx([math.hypot(*one["norms"].values()) for one in parameters])
    assert not [path for path in logs.iterdir() if path.name not in (*FILES, "trainer_logs.json")]


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("job", [pytest.param("trainer", marks=pytest.mark.slow), "pretrain"])
@pytest.mark.slow
def test_after_three_kills_each_step_is_recorded_once_as_in_a_run_that_nobody_touched(
    runs: Ranks, job: str, ranks: int
) -> None:
    settings: dict[str, Any] = {"words": ["checkpoint.save_interval=3"]} if job == "pretrain" else {}
    name = f"{job}-{ranks}"
    expected = runs.finish(f"whole-{name}", job, ranks=ranks, **settings)
    for event, number in [("on_step_end", 6), ("on_eval_end", 1), ("on_forward_backward_start", 9)]:
        strikes = [{"rank": ranks - 1, "signal": "SIGKILL", "event": event, "number": number}]
        assert 0 not in runs.start(name, job, ranks=ranks, strikes=strikes, **settings), runs.output(name)
    check_same(runs.finish(name, job, ranks=ranks, **settings), expected)
    for file in FILES:
        found = records(runs, name, file)
        assert found == records(runs, f"whole-{name}", file)
        steps = [one["global_step"] for one in found]
        assert steps == sorted(set(steps))
        assert 7 in steps, "asked for by a callback"
    assert "weight_norm" in records(runs, name, "trainer_logs.json")[0]


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_run_preempted_in_an_evaluation_records_its_norms_when_it_continues(runs: Ranks, ranks: int) -> None:
    name = f"preempted-{ranks}"
    settings = {"arguments": {"save_steps": 100}}
    runs.finish(f"whole-{name}", "trainer", ranks=ranks, **settings)
    strikes = [{"rank": 0, "signal": "SIGTERM", "event": "on_eval_step_start", "number": 1}]
    assert 0 not in runs.start(name, "trainer", ranks=ranks, strikes=strikes, **settings)
    assert records(runs, name, FILES[0]) == []
    runs.finish(name, "trainer", ranks=ranks, **settings)
    for file in FILES:
        assert records(runs, name, file) == records(runs, f"whole-{name}", file)


def test_a_run_with_the_loggers_has_the_weights_of_one_without(runs: Ranks) -> None:
    with_them = runs.finish("with", "trainer")
    without = runs.finish("without", "trainer", has_loggers=False, strikes=[])
    assert with_them["weights"] == without["weights"]
    for path, digest in without["files"].items():
        if path.startswith(("model/", "rng/")):
            assert with_them["files"][path] == digest, path
