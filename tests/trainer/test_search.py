"""A search of hyperparameters: its trials, its results beside those of transformers, and processes that are killed."""

from __future__ import annotations

import json
import pickle
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from onstep import Trainer, TrainerCallback
from onstep.errors import ConfigError, MissingExtraError, RunExistsError
from onstep.trainer.search.ray_log import TrialLog, trials_in
from tests.support.forked_processes import Processes
from tests.support.small_models import Regression, arguments, regression_rows
from tests.support.whole_runs import Ranks

JOBS = "tests.support.jobs.search_jobs"
STEPS = 8


def searching(directory: Path, make: type[Any] = Trainer, **options: Any) -> Any:
    """A Trainer whose trials take four steps, evaluated after every second."""
    given = {key: options.pop(key) for key in ("callbacks", "model_init", "model") if key in options}
    rows = regression_rows(8)
    values = {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 2, "logging_steps": 2, "save_strategy": "no"}
    args = arguments(directory, **{**values, **options})
    data = {"train_dataset": rows, "eval_dataset": rows[:4], "default_callbacks": False}
    return make(**{"args": args, "model_init": Regression, **data, **given})


def rate(trial: Any) -> dict[str, Any]:
    return {"learning_rate": trial.suggest_float("learning_rate", 1e-3, 1e-1, log=True)}


def stored(directory: Path) -> list[Any]:
    optuna = pytest.importorskip("optuna")
    study = optuna.load_study(study_name="search", storage=f"sqlite:///{directory}/optuna.db")
    found: list[Any] = study.get_trials(deepcopy=False)
    return found


# ---- results


@pytest.mark.slow
def test_a_search_finds_what_that_of_transformers_finds(tmp_path: Path) -> None:
    optuna, transformers = pytest.importorskip("optuna"), pytest.importorskip("transformers")

    class Noting(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append((state.is_hyper_param_search, state.trial_name, state.trial_params, args.learning_rate))

    def space(trial: Any) -> dict[str, Any]:
        return {**rate(trial), "weight_decay": trial.suggest_categorical("weight_decay", ["0", "0.1"])}

    def search(trainer: Any) -> Any:
        sampler = optuna.samplers.TPESampler(seed=1)
        return trainer.hyperparameter_search(
            space, None, 2, "maximize", "optuna", lambda trial: f"trial-{trial.number}", sampler=sampler
        )

    seen: list[Any] = []
    ours = search(searching(tmp_path / "ours", callbacks=[Noting()]))
    noted, seen = seen, []
    args = transformers.TrainingArguments(
        str(tmp_path / "theirs"),
        max_steps=4,
        eval_strategy="steps",
        eval_steps=2,
        use_cpu=True,
        per_device_train_batch_size=4,
        train_sampling_strategy="sequential",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    rows = regression_rows(8)
    callbacks = [type("Theirs", (transformers.TrainerCallback,), {"on_train_begin": Noting.on_train_begin})()]
    data: dict[str, Any] = {"train_dataset": rows, "eval_dataset": rows[:4], "callbacks": callbacks}
    theirs = search(transformers.Trainer(args=args, model_init=lambda: Regression(), **data))

    assert noted == seen
    assert len(noted) == 2
    assert ours._fields == theirs._fields
    assert (ours.run_id, ours.hyperparameters, ours.run_summary) == (theirs.run_id, theirs.hyperparameters, None)
    assert ours.objective == pytest.approx(theirs.objective, rel=1e-6)
    assert (tmp_path / "ours" / "run" / "trial-1" / "run.json").exists()


def test_a_pruned_trial_stops_as_any_run_does_with_its_reason(tmp_path: Path) -> None:
    optuna = pytest.importorskip("optuna")

    class TheSecond(optuna.pruners.BasePruner):  # type: ignore[misc, name-defined]
        def prune(self, study: Any, trial: Any) -> bool:
            return trial.number == 1 and trial.last_step >= 2

    class Ends(TrainerCallback):
        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            ends.append(state.global_step)

    ends: list[int] = []
    trainer = searching(tmp_path, callbacks=[Ends()])
    before = vars(trainer.args).copy()
    best = trainer.hyperparameter_search(rate, n_trials=3, pruner=TheSecond())
    again = searching(tmp_path, callbacks=[Ends()]).hyperparameter_search(rate, n_trials=3)

    assert ends == [4, 2, 4], "the last search found all of them done"
    assert again == best
    assert vars(trainer.args) == before
    assert [one.state.name for one in stored(tmp_path / "run")] == ["COMPLETE", "PRUNED", "COMPLETE"]
    decisions = [json.loads(line) for line in (tmp_path / "run" / "run-1" / "decisions.jsonl").read_text().splitlines()]
    assert "trial 1 is pruned by TheSecond: its objective is" in json.dumps(decisions)
    assert json.loads((tmp_path / "run" / "run-1" / "run.json").read_text())["status"] == "stopped"


def test_an_argument_without_effect_is_named_once_for_all_trials(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("optuna")
    trainer = searching(tmp_path)
    for _ in range(2):
        trainer.hyperparameter_search(lambda trial: {"num_train_epochs": trial.number + 5}, n_trials=2, study_name="a")
    trainer.hyperparameter_search(lambda trial: {"num_train_epochs": trial.number + 5}, n_trials=2, study_name="b")
    said = [line for line in caplog.messages if "num_train_epochs" in line and "without effect" in line]
    assert len(said) == 2, "once for each search"


# ---- what is refused


def searched(trainer: Any, **options: Any) -> None:
    trainer.hyperparameter_search(**{"hp_space": rate, "n_trials": 1, "backend": "optuna", **options})


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "backend": ({"backend": "wandb"}, "backend must be 'optuna' or 'ray', got 'wandb'"),
    "direction": ({"direction": "up"}, "direction must be 'minimize' or 'maximize', or a list of them, got 'up'"),
    "place": ({"output_dir": "s3://bucket/runs/x"}, "output_dir=s3://bucket/runs/x must be a directory for a search"),
    "number": ({"n_trials": 0}, "n_trials must be an integer >= 1, got 0"),
}
REFUSED_SPACES: dict[str, tuple[dict[str, Any], str]] = {
    "name": ({"hp_space": lambda trial: {"learningrate": 0.1}}, "hp_space names 'learningrate', which is not an arg"),
    "nothing": ({"hp_space": lambda trial: None}, "hp_space must return a dict of arguments by name, got None"),
    "type": ({"hp_space": lambda trial: {"learning_rate": "fast"}}, "learning_rate='fast', which cannot be made float"),
    "value": ({"hp_space": lambda trial: {"per_device_train_batch_size": 0}}, "per_device_train_batch_size"),
    "keyword": ({"resources_per_trial": {}}, "hyperparameter_search has no keyword resources_per_trial"),
    "threads": ({"n_jobs": 2}, "n_jobs must be 1, got 2"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_search_that_cannot_be_made_is_refused(tmp_path: Path, kind: str) -> None:
    options, words = REFUSED[kind]
    place = {name: value for name, value in options.items() if name == "output_dir"}
    options = {name: value for name, value in options.items() if name != "output_dir"}
    with pytest.raises(ConfigError, match=words):
        searched(searching(tmp_path, **place), **options)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", REFUSED_SPACES)
def test_a_space_that_cannot_be_searched_is_refused_before_any_trial(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("optuna")
    options, words = REFUSED_SPACES[kind]
    with pytest.raises(ConfigError, match=words):
        searched(searching(tmp_path), **options)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("storage", ["search.db", "sqlite:////dev/null/x.db"])
def test_a_storage_that_cannot_be_opened_is_refused(tmp_path: Path, storage: str) -> None:
    pytest.importorskip("optuna")
    with pytest.raises(ConfigError, match=rf"storage='{storage}' cannot be opened \(.*\); give an existing directory"):
        searched(searching(tmp_path), storage=storage)


def test_a_space_of_another_kind_than_that_of_the_study_is_refused_before_a_trial(tmp_path: Path) -> None:
    pytest.importorskip("optuna")

    def space_of(sizes: list[int]) -> Any:
        return lambda trial: {"per_device_train_batch_size": trial.suggest_categorical("size", sizes)}

    searched(searching(tmp_path), hp_space=space_of([2, 4]))
    with pytest.raises(ConfigError, match=r"hp_space gives size by .*\(2, 8\).*, and the study 'search' has it by .*4"):
        searched(searching(tmp_path), hp_space=space_of([2, 8]), n_trials=2)
    assert [one.state.name for one in stored(tmp_path / "run")] == ["COMPLETE"]


def test_a_search_without_model_init_or_without_the_package_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="hyperparameter_search requires model_init"):
        searched(searching(tmp_path, model=Regression(), model_init=None))
    monkeypatch.setitem(sys.modules, "optuna", None)
    monkeypatch.delitem(sys.modules, "onstep.trainer.search.optuna_sweep", raising=False)
    with pytest.raises(MissingExtraError, match=r"requires optuna: pip install 'onstep\[optuna\]'"):
        searched(searching(tmp_path))
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "onstep.trainer.search.ray_sweep", raising=False)
    with pytest.raises(MissingExtraError, match=r"requires Ray Tune: pip install 'onstep\[ray\]'"):
        searched(searching(tmp_path), backend="ray")


def test_a_trainer_can_be_sent_to_another_process_where_it_trains_the_same(tmp_path: Path) -> None:
    trainer = searching(tmp_path / "here")
    sent = pickle.loads(pickle.dumps(trainer))
    sent.args.output_dir = str(tmp_path / "there")
    losses = [one.train().training_loss for one in (trainer, sent)]
    assert losses[0] == losses[1]
    assert sent.accelerator is not trainer.accelerator
    assert sent.accelerator._trainer is sent


def test_what_has_happened_to_trials_is_read_also_where_a_crash_has_torn_the_file(tmp_path: Path) -> None:
    log = TrialLog(tmp_path)
    assert trials_in(log.lines()) == {}
    log.append("0", name="run-0", parameters={"learning_rate": 0.1})
    log.append("0", result={"objective": float("inf"), "step": 2})
    with (tmp_path / "trials.jsonl").open("a") as file:
        file.write('{"trial": "0", "result": {"obj')
    log.append("1", name="mine", parameters={})
    log.append("0", result={"objective": 1.0, "step": 4}, ended=True)
    log.append("2", ended=True)
    found = trials_in(log.lines())
    assert found.keys() == {"0", "1"}
    assert [one["step"] for one in found["0"].results] == [2, 4]
    assert (found["0"].has_ended, found["1"].has_ended, found["1"].name) == (True, False, "mine")
    assert found["0"].results[0]["objective"] == float("inf")


def test_a_trial_that_fails_ends_the_search_unless_its_error_is_caught(tmp_path: Path) -> None:
    pytest.importorskip("optuna")

    class Fails(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if args.output_dir.endswith("run-1"):
                raise RuntimeError("out of luck")

    trainer = searching(tmp_path, callbacks=[Fails()])
    with pytest.raises(RuntimeError, match="out of luck") as caught:
        trainer.hyperparameter_search(rate, n_trials=3)
    assert "This ended trial 1 of the search, which the same call continues" in "".join(caught.value.__notes__)
    assert [one.state.name for one in stored(tmp_path / "run")] == ["COMPLETE", "RUNNING"]

    searching(tmp_path, callbacks=[Fails()]).hyperparameter_search(rate, n_trials=3, catch=(RuntimeError,))
    assert [one.state.name for one in stored(tmp_path / "run")] == ["COMPLETE", "FAIL", "COMPLETE"]


def test_a_trial_that_another_process_holds_has_not_failed(tmp_path: Path) -> None:
    pytest.importorskip("optuna")

    class Second(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if not caught:
                with pytest.raises(RunExistsError, match="is in use by a live process") as error:
                    searching(tmp_path).hyperparameter_search(rate, n_trials=1, catch=(Exception,))
                caught.append(str(error.value.__notes__))

    caught: list[str] = []
    searching(tmp_path, callbacks=[Second()]).hyperparameter_search(rate, n_trials=1)
    assert "One process, or one job of torchrun, trains the trials of a study at a time." in caught[0]
    assert [one.state.name for one in stored(tmp_path / "run")] == ["COMPLETE"]


def test_the_model_is_made_from_the_trial_and_each_has_its_label_smoothing(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    widths: list[int] = []

    def model(trial: Any) -> torch.nn.Module:
        widths.append(trial.suggest_int("width", 3, 3) + trial.number)
        return Regression()

    def space(trial: Any) -> dict[str, Any]:
        return {"label_smoothing_factor": 0.1 * trial.number, "width": 3}

    class OwnLoss(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return model(**inputs)["loss"]

    class Noting(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            found.append((trainer.label_smoother is not None, state.trial_params))

    found: list[Any] = []
    trainer = searching(tmp_path, OwnLoss, model_init=model, callbacks=[Noting()], eval_strategy="no")
    trainer.hyperparameter_search(space, n_trials=2, compute_objective=lambda metrics: 1.0)
    assert widths == [3, 4]
    assert found == [(False, {"width": 3}), (True, {"width": 3})]


# ---- processes that are killed


@pytest.fixture(scope="module")
def sweeps(processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    pytest.importorskip("optuna")
    processes.load("optuna", "optuna.storages", "sqlalchemy.dialects.sqlite", "alembic.command")
    return Ranks(processes, tmp_path_factory.mktemp("sweeps"), JOBS)


def searched_in(sweeps: Ranks, name: str, *, ranks: int = 1, **settings: Any) -> dict[str, Any]:
    codes = sweeps.start(name, "search", ranks=ranks, **settings)
    assert codes == [0] * ranks, sweeps.output(name)
    found: dict[str, Any] = json.loads((sweeps.directory / name / "result-0.json").read_text())
    return found


def steps_of(sweeps: Ranks, name: str) -> Counter[str]:
    return Counter((sweeps.directory / name / "steps.txt").read_text().splitlines())


def kill(sweeps: Ranks, name: str, **settings: Any) -> None:
    codes = sweeps.start(name, "search", **{"ranks": 1, **settings})
    assert -9 in codes, sweeps.output(name)


def test_a_killed_search_continues_its_trial_and_ends_as_the_one_that_nobody_touched(sweeps: Ranks) -> None:
    expected = searched_in(sweeps, "whole")
    kill(sweeps, "killed", kill_after=STEPS + 7)  # at step 7 of the second trial: evaluated at 6, saved at 4
    found = searched_in(sweeps, "killed")

    assert found == expected
    assert [one["state"] for one in found["trials"]] == ["COMPLETE"] * 3
    done = steps_of(sweeps, "killed")
    repeated = sorted(step for step, count in done.items() if count > 1)
    assert repeated == [f"run-1 {step}" for step in (5, 6, 7)]
    assert len(done) == 3 * STEPS


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["independent", "multivariate"])
def test_a_search_of_12_trials_killed_twice_has_the_trials_of_one_that_nobody_touched(
    sweeps: Ranks, sampler: str
) -> None:
    settings = {"n_trials": 12, "sampler": sampler}
    expected = searched_in(sweeps, f"whole-{sampler}", **settings)
    name = f"killed-{sampler}"
    kill(sweeps, name, kill_after=30, **settings)
    after_first = len(steps_of(sweeps, name))
    kill(sweeps, name, kill_after=25, **settings)
    found = searched_in(sweeps, name, **settings)

    whole, done = steps_of(sweeps, f"whole-{sampler}"), steps_of(sweeps, name)
    states = Counter(one["state"] for one in found["trials"])
    print(
        f"{sampler}: {len(found['trials'])} trials {dict(states)}, killed after {after_first} of {len(whole)} steps "
        f"and again 25 steps later; {sum(done.values()) - len(done)} steps repeated; best {found['best']}"
    )
    assert found == expected
    assert len(found["trials"]) == 12
    assert states["PRUNED"] > 0
    assert done.keys() == whole.keys()
    assert sum(done.values()) - len(done) <= 6, "at most three steps since a checkpoint, for each kill"


@pytest.mark.slow
@pytest.mark.parametrize("several", [False, True])
def test_a_trial_whose_run_has_ended_is_not_trained_again(sweeps: Ranks, several: bool) -> None:
    name = f"ended-{several}"
    expected = searched_in(sweeps, f"whole-{name}", several=several)
    kill(sweeps, name, dies_after=1, several=several)
    assert searched_in(sweeps, name, several=several) == expected
    assert set(steps_of(sweeps, name).values()) == {1}


@pytest.mark.slow
def test_a_trial_without_evaluations_is_evaluated_when_it_ends_or_when_the_search_continues(sweeps: Ranks) -> None:
    expected = searched_in(sweeps, "whole-unevaluated", evaluates=False)
    kill(sweeps, "unevaluated", dies_after=1, evaluates=False)
    assert searched_in(sweeps, "unevaluated", evaluates=False) == expected
    assert set(steps_of(sweeps, "unevaluated").values()) == {1}


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_train_the_same_trials_and_continue_a_killed_search(sweeps: Ranks) -> None:
    settings: dict[str, Any] = {"n_trials": 5}
    expected = searched_in(sweeps, "whole-ranks", ranks=2, **settings)
    kill(sweeps, "ranks", ranks=2, kill_after=STEPS + 7, **settings)
    found = searched_in(sweeps, "ranks", ranks=2, **settings)
    other = json.loads((sweeps.directory / "ranks" / "result-1.json").read_text())

    assert found == expected
    assert other == found
    repeated = sorted(step for step, count in steps_of(sweeps, "ranks").items() if count > 1)
    assert repeated == [f"run-1 {step}" for step in (5, 6, 7)]
    print(f"2 ranks: {len(found['trials'])} trials, {[one['state'] for one in found['trials']]}")
