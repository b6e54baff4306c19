"""A search with Ray Tune: its trials, searches that are killed, and trials that a scheduler stops.

Requires Ray: `make ray` installs it into an environment of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from onstep.errors import ConfigError
from onstep.trainer.search.ray_log import TrialLog
from tests.support.ray_cluster import PATIENCE, RayCluster, ray_cluster
from tests.trainer.test_search import searching

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    tune = pytest.importorskip("ray.tune", reason="Ray is not installed (make ray)")
    from ray.tune.experiment import Trial

    from onstep.trainer.search.ray_trials import Trials
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.slow,
    pytest.mark.process,
    pytest.mark.timeout(3600),
]
STEPS = 8
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster(cpus=2) as started:
        yield started


def start(cluster: RayCluster, place: Path, **settings: Any) -> tuple[int, str]:
    """The exit code and the output of a process that makes a search in a directory."""
    place.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "tests.support.jobs.ray_search_jobs"]
    command.append(json.dumps({"address": cluster.address, **settings}))
    path = f"{ROOT}:{cluster.environment['PYTHONPATH']}"
    with (place / "output.txt").open("ab") as output:
        done = subprocess.run(
            command, cwd=place, env={**cluster.environment, "PYTHONPATH": path}, stdout=output, stderr=output,
            check=False, timeout=4 * PATIENCE,
        )  # fmt: skip
    return done.returncode, (place / "output.txt").read_text(errors="replace")[-5000:]


def searched(cluster: RayCluster, place: Path, **settings: Any) -> dict[str, Any]:
    code, said = start(cluster, place, **settings)
    assert code == 0, said
    found: dict[str, Any] = json.loads((place / "result.json").read_text())
    return found


def kill(cluster: RayCluster, place: Path, at: int, **settings: Any) -> None:
    code, said = start(cluster, place, kill_after=at, **settings)
    assert code == -9, said


def steps_of(place: Path) -> Counter[str]:
    return Counter((place / "steps.txt").read_text().splitlines())


def lines_of(place: Path, trial: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (place / "sweep" / "trials.jsonl").read_text().splitlines()]
    return [line for line in lines if line["trial"] == trial]


def test_a_search_of_12_trials_killed_twice_has_the_trials_of_one_that_nobody_touched(
    cluster: RayCluster, tmp_path: Path
) -> None:
    settings = {"n_trials": 12, "stops": True}
    expected, place = searched(cluster, tmp_path / "whole", **settings), tmp_path / "killed"
    num_steps = sum(steps_of(tmp_path / "whole").values())
    kill(cluster, place, at=7, **settings)
    kill(cluster, place, at=num_steps // 2, **settings)
    found = searched(cluster, place, **settings)

    whole, done = steps_of(tmp_path / "whole"), steps_of(place)
    stopped = [one["id"] for one in found["trials"] if one["step"] < STEPS]
    print(
        f"\n{len(found['trials'])} trials, of which ASHA has stopped {len(stopped)}; killed after 7 and "
        f"{num_steps // 2} of {num_steps} steps, {sum(done.values()) - len(done)} of which were repeated; "
        f"best {found['best']}"
    )
    assert found == expected
    assert [one["id"] for one in found["trials"]] == [str(number) for number in range(12)]
    assert sorted(one.name for one in (place / "sweep").glob("run-*")) == sorted(f"run-{n}" for n in range(12))
    assert 0 < len(stopped) < 12
    assert done.keys() == whole.keys()
    assert sum(done.values()) - len(done) <= 2 * 4, "at most those since a checkpoint, for each kill"
    for number in stopped:
        run = place / "sweep" / f"run-{number}"
        assert json.loads((run / "run.json").read_text())["status"] == "stopped"
        why = f"trial {number} is stopped by AsyncHyperBandScheduler: its objective is"
        assert why in (run / "decisions.jsonl").read_text()
    assert sum("ended" in line for number in range(12) for line in lines_of(place, str(number))) == 12


def test_a_killed_search_continues_its_trial_and_its_search_algorithm(cluster: RayCluster, tmp_path: Path) -> None:
    expected, place = searched(cluster, tmp_path / "whole", learns=True), tmp_path / "killed"
    kill(cluster, place, at=STEPS + 7, learns=True)  # at step 7 of the second trial: evaluated at 6, saved at 4
    found = searched(cluster, place, learns=True)
    assert found == expected
    done = steps_of(place)
    assert [step for step in sorted(done) if done[step] > 1] == [f"run-1 {step}" for step in (5, 6, 7)]
    assert len(done) == 3 * STEPS
    results = [line["result"]["step"] for line in lines_of(place, "1") if "result" in line]
    assert results == [2, 4, 6, 8], "no result is written twice"


def test_two_trials_at_once_are_those_of_one_after_another_and_the_same_call_finds_them_done(
    cluster: RayCluster, tmp_path: Path
) -> None:
    place = tmp_path / "two"
    kill(cluster, place, at=12, n_trials=3, at_once=2, evaluates=False)
    found = searched(cluster, place, n_trials=3, at_once=2, evaluates=False)
    assert [one["step"] for one in found["trials"]] == [STEPS] * 3, "evaluated when they have ended"
    steps = steps_of(place)
    assert len(steps) == 3 * STEPS
    assert searched(cluster, place, n_trials=3, evaluates=False) == found
    assert steps_of(place) == steps, "no trial was trained again"
    more = searched(cluster, place, n_trials=4, evaluates=False)
    assert more["trials"][:3] == found["trials"]
    assert steps_of(place).keys() - steps.keys() == {f"run-3 {step}" for step in range(1, STEPS + 1)}


def test_a_trial_that_fails_is_named_and_trained_by_the_next_call(cluster: RayCluster, tmp_path: Path) -> None:
    code, said = start(cluster, tmp_path, fails=True)
    assert code == 1
    assert "OnstepError: 1 of the trials failed; the first is run-1: RuntimeError: out of luck; the same call" in said
    found = searched(cluster, tmp_path)
    assert [one["step"] for one in found["trials"]] == [STEPS] * 3
    assert {count for step, count in steps_of(tmp_path).items() if not step.startswith("run-1 ")} == {1}


class Three:
    """A search algorithm that gives three trials, so many at once, and notes what it is given."""

    total_samples = 3

    def __init__(self, at_once: int) -> None:
        self.at_once, self.noted = at_once, list[Any]()
        self.live, self.given = set[str](), 0

    def next_trial(self) -> Any:
        if self.given == 3 or len(self.live) == self.at_once:
            return None
        trial = Trial("stub", config={"x": self.given / 3}, stub=True)
        self.given += 1
        self.live.add(trial.trial_id)
        return trial

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        self.noted.append(result["objective"])

    def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
        self.live.remove(trial_id)
        self.noted.append((result["objective"], "ended"))

    def is_finished(self) -> bool:
        return self.given == 3


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_past_trials_are_repeated_in_their_order_also_where_fewer_are_allowed_at_once(
    tmp_path: Path, at_once: int
) -> None:
    def trials(at_once: int) -> tuple[Three, list[Any], Trials]:
        inner, seen = Three(at_once), list[Any]()
        scheduler = SimpleNamespace(
            on_trial_result=lambda controller, trial, result: seen.append((trial.trial_id, result["objective"])),
            on_trial_complete=lambda controller, trial, result: seen.append((trial.trial_id, "ended")),
        )
        return (
            inner,
            seen,
            Trials(inner, scheduler, TrialLog(tmp_path), "min", lambda config, number, names: f"run-{number}"),
        )

    def result(objective: float, iteration: int) -> dict[str, Any]:
        return {"objective": objective, "step": iteration, "training_iteration": iteration, "config/x": 1}

    inner, _, first = trials(2)
    assert [first.next_trial().trial_id for _ in "01"] == ["0", "1"]
    assert first.next_trial() is None
    first.on_trial_result("1", result(1.5, 1))
    first.on_trial_complete("0", result(3.0, 1))
    assert first.next_trial().trial_id == "2"
    first.on_trial_result("2", result(2.5, 1))
    first.on_trial_complete("1", result(1.0, 2))
    expected = inner.noted

    inner, seen, second = trials(at_once)
    again = [second.next_trial() for _ in "012"]
    assert [one.status for one in again] == ["TERMINATED", "TERMINATED", "PENDING"]
    assert [one.config for one in again] == [{"x": 0}, {"x": 1 / 3}, {"x": 2 / 3}]
    assert [again[1].last_result[name] for name in ("objective", "step")] == [1.0, 2]
    assert second.next_trial() is None
    assert sorted(map(str, inner.noted)) == sorted(map(str, [one for one in expected if one != 2.5]))
    assert sorted(map(str, seen)) == sorted(
        map(str, [("0", 3.0), ("0", "ended"), ("1", 1.5), ("1", 1.0), ("1", "ended")])
    )
    if at_once > 1:
        assert inner.noted == [one for one in expected if one != 2.5]
    assert not second.have_ended
    second.on_trial_result("2", result(2.5, 1))  # reported again by its process
    second.on_trial_complete("2", result(2.0, 2))
    assert second.have_ended
    assert [
        line["result"]["objective"] for line in TrialLog(tmp_path).lines() if line["trial"] == "2" and "result" in line
    ] == [2.5, 2.0]


def space(trial: object) -> dict[str, Any]:
    return {"learning_rate": tune.loguniform(1e-3, 1e-1)}


def scheduler(name: str) -> Any:
    from ray.tune import schedulers

    options = {"hyperparam_mutations": {"learning_rate": [1e-3, 1e-2]}} if name == "PopulationBasedTraining" else {}
    return getattr(schedulers, name)(**options)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "keyword": ({"sampler": None}, "no keyword sampler with backend='ray'; it accepts those of ray.tune.run"),
    "continuing": ({"resume": True}, "no keyword resume with backend='ray'"),
    "directions": ({"direction": ["minimize", "maximize"]}, "backend='ray' requires one direction"),
    "name": ({"hp_space": lambda trial: {"learningrate": tune.uniform(0, 1)}}, "hp_space names 'learningrate'"),
    "nothing": ({"hp_space": lambda trial: None}, "hp_space must return a dict of arguments by name, got None"),
    "waiting": ({"scheduler": "HyperBandScheduler"}, "use one that stops trials, such as ASHAScheduler"),
    "weights": ({"scheduler": "PopulationBasedTraining"}, "scheduler=PopulationBasedTraining gives a trial the wei"),
    "evaluations": ({"scheduler": "ASHAScheduler", "eval_strategy": "no"}, "eval_strategy='no' has none; set eval_st"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_search_that_ray_cannot_make_is_refused_before_any_trial(tmp_path: Path, kind: str) -> None:
    options, words = REFUSED[kind]
    options = {"hp_space": space, "n_trials": 1, "backend": "ray", **options}
    if "scheduler" in options:
        options["scheduler"] = scheduler(options["scheduler"])
    trainer = searching(tmp_path, eval_strategy=options.pop("eval_strategy", "steps"))
    with pytest.raises(ConfigError, match=words):
        trainer.hyperparameter_search(**options)
    assert not (tmp_path / "run").exists()
