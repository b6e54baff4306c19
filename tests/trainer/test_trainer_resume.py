"""Runs of the Trainer that are killed in the middle and started again end as the ones that nobody touched."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from onstep.checkpoint import checkpoints, read_manifest
from tests.support.forked_processes import Processes
from tests.support.whole_runs import Ranks, check_same

JOBS = "tests.support.jobs.trainer_jobs"
KILLED = {"signal": "SIGKILL"}


@pytest.fixture(scope="module")
def runs(processes: Processes, tmp_path_factory: pytest.TempPathFactory, corpus: Path, token_cache: Path) -> Ranks:
    processes.load("transformers.trainer_callback", "transformers.models.qwen2.modeling_qwen2")
    return Ranks(processes, tmp_path_factory.mktemp("runs"), JOBS, corpus=str(corpus), cache=str(token_cache))


def result(runs: Ranks, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((runs.directory / name / "result-0.json").read_text())
    return found


def kill(runs: Ranks, name: str, event: str, number: int, **settings: Any) -> None:
    strikes = [{**KILLED, "event": event, "number": number}]
    codes = runs.start(name, "train", ranks=1, strikes=strikes, **settings)
    assert codes == [-9], runs.output(name)


@pytest.fixture(scope="module")
def whole(runs: Ranks) -> dict[str, Any]:
    """The outcome of the run `whole`, which nobody touched."""
    return runs.finish("whole", "train", ranks=1)


@pytest.fixture(scope="module")
def killed(runs: Ranks) -> str:
    """The name of a run that was killed at step 8, to be copied."""
    kill(runs, "killed", "on_step_end", 8)
    return "killed"


def copied(runs: Ranks, name: str, to: str) -> None:
    """Copy a run with its directory."""
    shutil.copytree(runs.directory / name, runs.directory / to)


KINDS: dict[str, dict[str, Any]] = {
    "dropout": {},
    "workers": {"arguments": {"dataloader_num_workers": 2}},
    "bf16": {"arguments": {"bf16": True}},
    "fp16": {"arguments": {"fp16": True}, "overrides": {"optimizer.loss_scale_window": 3}},
    "scheduler-objects": {"model": "linear", "optimizers": "objects"},
    "factories": {"optimizers": "factories", "overrides": {"checkpoint.async_save": True}},
    "fp16-foreign": {"model": "linear", "optimizers": "factories", "arguments": {"fp16": True}},
    "epochs": {"arguments": {"save_strategy": "epoch", "eval_strategy": "epoch", "logging_strategy": "epoch"}},
    "best": {"arguments": {"save_strategy": "best", "metric_for_best_model": "loss", "eval_steps": 2}},
    "eval-on-save": {"overrides": {"validation.eval_on_save": True}},
    "own-methods": {"own_methods": True},
    "plateau": {"arguments": {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0}}},
    "clipping": {"arguments": {"max_grad_norm": 0.1, "lr_scheduler_type": "cosine", "warmup_steps": 2}},
}

ALIKE = ("fp16-foreign", "eval-on-save", "clipping", "workers")
"""Kinds that differ from others in what other tests kill, too."""


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] if kind in ALIKE else []) for kind in KINDS]
)
def test_a_killed_run_ends_as_the_one_that_nobody_touched(runs: Ranks, kind: str) -> None:
    settings = KINDS[kind]
    expected = runs.finish(f"whole-{kind}", "train", ranks=1, **settings)
    kill(runs, kind, "on_step_end", 5, **settings)
    kill(runs, kind, "on_forward_backward_start", 9, **settings)
    found = runs.finish(kind, "train", ranks=1, **settings)
    check_same(found, expected)
    assert len(expected["certificates"][0]) == 14, "7 steps an epoch, the last one a tail"


@pytest.mark.slow
def test_two_ranks_with_methods_of_their_own_end_as_ones_that_nobody_touched(runs: Ranks) -> None:
    overrides = {"train.check_weight_hash_across_dp_replicas_interval": 1}
    settings: dict[str, Any] = {"own_methods": True, "overrides": overrides, "arguments": {"eval_steps": 1}}
    expected = runs.finish("whole-own-ranks", "train", **settings)
    strikes = [{**KILLED, "event": "on_step_end", "number": 5, "rank": 0}]
    assert -9 in runs.start("own-ranks", "train", strikes=strikes, **settings)
    check_same(runs.finish("own-ranks", "train", **settings), expected)
    rates = [record["learning_rate"] for record in json.loads(log_of(runs, "own-ranks")) if "loss" in record]
    assert rates[-1] < rates[0], "the metric must have changed the rate"


def log_of(runs: Ranks, name: str) -> str:
    return (runs.directory / name / "runs" / "run" / "trainer_logs.json").read_text()


def test_save_strategy_best_saves_at_the_evaluations_that_are_the_best_so_far(runs: Ranks) -> None:
    runs.finish("best-so-far", "train", ranks=1, **KINDS["best"])
    best, saved = None, []
    log = json.loads((runs.directory / "best-so-far" / "runs" / "run" / "trainer_logs.json").read_text())
    for record in log:
        if "eval_loss" in record and (best is None or record["eval_loss"] < best):
            best = record["eval_loss"]
            saved.append(record["global_step"])
    assert len(saved) > 1
    assert runs.steps("best-so-far") == saved
    assert result(runs, "best-so-far")["best"] == [best, saved[-1]]


def test_eval_on_save_evaluates_at_every_save(runs: Ranks) -> None:
    arguments = {"eval_strategy": "no"}
    runs.finish("on-save", "train", ranks=1, arguments=arguments, overrides={"validation.eval_on_save": True})
    for info in checkpoints(runs.root("on-save")):
        if info.step % 3 == 0:
            assert "eval_loss" in read_manifest(info.path).metrics
    log = json.loads((runs.directory / "on-save" / "runs" / "run" / "trainer_logs.json").read_text())
    assert {record["global_step"] for record in log if "eval_loss" in record} >= {3, 6, 9, 12}


def test_save_strategy_no_saves_nothing_and_a_killed_run_starts_from_scratch(runs: Ranks) -> None:
    arguments = {"save_strategy": "no"}
    settings = {"arguments": arguments}
    assert runs.start("whole-unsaved", "train", ranks=1, **settings) == [0]
    kill(runs, "unsaved", "on_step_end", 9, **settings)
    assert runs.start("unsaved", "train", ranks=1, **settings) == [0]
    assert runs.steps("unsaved") == []
    assert result(runs, "unsaved") == result(runs, "whole-unsaved")


def test_the_limit_keeps_the_newest_and_the_best_is_loaded_at_the_end(runs: Ranks) -> None:
    arguments = {
        "save_total_limit": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "eval_steps": 2,
        "save_steps": 2,
        "learning_rate": 0.9,  # so that the last is not the best
    }
    settings = {"model": "linear", "arguments": arguments}
    expected = runs.finish("whole-limit", "train", ranks=1, **settings)
    best = result(runs, "whole-limit")["best"][1]
    newest = runs.steps("whole-limit")[-1]
    assert runs.steps("whole-limit") == sorted({best, newest})
    assert best < newest
    directory = runs.directory / "whole-limit" / "runs" / "run"
    of_best = load_file(directory / f"checkpoint-{best}" / "model.safetensors")
    final = load_file(next(directory.glob("*.safetensors")))
    assert all((of_best[name] == value).all() for name, value in final.items())
    kill(runs, "limit", "on_step_end", 7, **settings)
    check_same(runs.finish("limit", "train", ranks=1, **settings), expected)
    assert runs.steps("limit") == runs.steps("whole-limit")


def test_early_stopping_of_transformers_keeps_its_patience(runs: Ranks) -> None:
    arguments = {"metric_for_best_model": "loss", "eval_steps": 1, "save_steps": 1, "learning_rate": 0.9}
    settings = {"model": "linear", "arguments": arguments, "patience": 3}
    expected = runs.finish("whole-patience", "train", ranks=1, **settings)
    last = result(runs, "whole-patience")["step"]
    assert last < 14, "it is to stop early"
    for number in range(last - 2, last):
        kill(runs, f"patience-{number}", "on_step_end", number, **settings)
        check_same(runs.finish(f"patience-{number}", "train", ranks=1, **settings), expected)


def test_a_checkpoint_may_be_named_and_a_mistyped_one_is_an_error(
    runs: Ranks, whole: dict[str, Any], killed: str
) -> None:
    copied(runs, killed, "named")
    newest = runs.root("named") / "checkpoint-3"
    assert runs.start("named", "train", ranks=1, resume=str(newest).replace("checkpoint-3", "checkpoint-4")) == [1]
    assert "does not exist" in runs.output("named")
    assert "checkpoint-3" in runs.output("named")
    check_same(runs.finish("named", "train", ranks=1, resume=str(newest)), whole)


def test_resume_true_continues_and_false_starts_from_scratch(runs: Ranks, whole: dict[str, Any], killed: str) -> None:
    for name, resume in (("true", True), ("false", False)):
        copied(runs, killed, name)
        check_same(runs.finish(name, "train", ranks=1, resume=resume), whole)
    assert (runs.root("false") / "checkpoints-1" / "checkpoint-6").is_dir()


def test_resume_true_without_a_checkpoint_is_an_error(runs: Ranks) -> None:
    assert runs.start("nothing", "train", ranks=1, resume=True) == [1]
    assert "has no checkpoint to continue from; drop the argument" in runs.output("nothing")


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "rate": ({"arguments": {"learning_rate": 2e-2}}, "learning_rate was 0.01 and is 0.02"),
    "labels": ({"flips": True}, "the training data has changed: labels was changed"),
    "loss": ({"loss": "halved"}, "the code of loss, model or data has changed: compute_loss_func was added"),
    "weights": ({"model_seed": 1}, "the initial weights have changed: "),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_killed_run_that_has_changed_starts_anew_and_names_what_differs(
    runs: Ranks, killed: str, change: str
) -> None:
    settings, line = CHANGES[change]
    expected = runs.finish(f"new-{change}", "train", ranks=1, **settings)
    name = f"changed-{change}"
    copied(runs, killed, name)
    runs.forget_output(name)
    check_same(runs.finish(name, "train", ranks=1, **settings), expected)
    assert line in runs.output(name)
    aside = runs.root(name) / "checkpoints-1"
    assert f"resume_from_checkpoint='runs/run/{aside.name}'" in runs.output(name)
    assert [info.step for info in checkpoints(aside)] == [6, 3]


def test_what_was_changed_can_be_continued_all_the_same(runs: Ranks, killed: str) -> None:
    copied(runs, killed, "all-the-same")
    assert runs.start("all-the-same", "train", ranks=1, flips=True, resume=True) == [0], runs.output("all-the-same")
    assert "the training data has changed: labels was changed" in runs.output("all-the-same")
    assert result(runs, "all-the-same")["begins"] == 6
    copied(runs, killed, "from-aside")
    kill(runs, "from-aside", "on_step_end", 4, flips=True)
    settings = {"flips": True, "resume": "runs/run/checkpoints-1"}
    assert runs.start("from-aside", "train", ranks=1, **settings) == [0], runs.output("from-aside")
    assert result(runs, "from-aside")["begins"] == 6


def test_a_completed_run_trains_again_and_ends_as_before(runs: Ranks, whole: dict[str, Any]) -> None:
    copied(runs, "whole", "again")
    check_same(runs.finish("again", "train", ranks=1), whole)
    assert result(runs, "again")["begins"] == 0
    assert "a run that is finished (14 steps). Training starts from scratch" in runs.output("again")
    assert max(info.step for info in checkpoints(runs.root("again") / "checkpoints-1")) == 14


def test_a_completed_run_with_resume_true_has_nothing_left_to_do(runs: Ranks, whole: dict[str, Any]) -> None:
    copied(runs, "whole", "nothing-left")
    check_same(runs.finish("nothing-left", "train", ranks=1, resume=True), whole)
    assert "is finished: 14 steps, nothing left to do. To train longer, raise max_steps" in runs.output("nothing-left")
    assert not (runs.root("nothing-left") / "checkpoints-1").exists()


def test_a_completed_run_can_be_trained_longer(runs: Ranks) -> None:
    constant = {"lr_scheduler_type": "constant"}
    expected = runs.finish("long", "train", ranks=1, arguments={**constant, "num_train_epochs": 3})
    runs.finish("longer", "train", ranks=1, arguments=constant)
    found = runs.finish("longer", "train", ranks=1, arguments={**constant, "num_train_epochs": 3}, resume=True)
    assert "num_train_epochs was 2.0 and is 3.0" in runs.output("longer")
    assert (found["step"], found["weights"]) == (21, expected["weights"])


@pytest.mark.usefixtures("whole")
def test_a_changed_run_that_dies_before_its_next_save_continues_with_the_change(runs: Ranks) -> None:
    changed: dict[str, Any] = {"arguments": {"num_train_epochs": 3, "adam_beta1": 0.5}, "resume": True}
    for name in ("changed-whole", "changed-killed"):
        copied(runs, "whole", name)
    expected = runs.finish("changed-whole", "train", ranks=1, **changed)
    kill(runs, "changed-killed", "on_step_end", 1, **changed)
    check_same(runs.finish("changed-killed", "train", ranks=1, **changed), expected)


def test_two_ranks_decide_together(runs: Ranks) -> None:
    expected = runs.finish("two-whole", "train")
    strikes = [{**KILLED, "event": "on_step_end", "number": 5, "rank": 1}]
    assert -9 in runs.start("two", "train", strikes=strikes)
    check_same(runs.finish("two", "train"), expected)
    assert -9 in runs.start("two-changed", "train", strikes=strikes)
    flipped = runs.finish("two-flipped", "train", flips=True)
    check_same(runs.finish("two-changed", "train", flips=True), flipped)
    assert runs.output("two-changed").count("the training data has changed") == 1


def test_a_second_train_of_one_trainer_is_a_run_of_its_own(runs: Ranks) -> None:
    assert runs.start("second", "train", ranks=1, again=True) == [0], runs.output("second")
    run = runs.directory / "second" / "runs" / "run"
    assert result(runs, "second")["first"] == result(runs, "second")["step"] == 14
    for directory in (run, run / "checkpoints-1"):
        assert max(info.step for info in checkpoints(directory)) == 14
