"""Overrides that load and save parts of a checkpoint: a killed run continues with the same bits, and with their own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from onstep import Trainer, TrainerCallback
from onstep.checkpoint import verify
from onstep.errors import ConfigError, OnstepError
from tests.support.forked_processes import Processes
from tests.support.small_models import arguments, regression_rows
from tests.support.state_overrides import (
    OPTIONS,
    AllOfThem,
    LogsItself,
    Noisy,
    OwnGenerators,
    OwnOptimizer,
    OwnWeights,
    WithCoefficient,
    losses,
    trained,
    weights,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")


@pytest.mark.parametrize("cls", [WithCoefficient, OwnWeights, OwnGenerators, OwnOptimizer, LogsItself])
def test_a_killed_run_continues_with_the_same_bits(cls: Any, tmp_path: Path) -> None:
    options = {"logging_steps": 3, "eval_strategy": "steps", "eval_steps": 4}
    whole = trained(cls, tmp_path / "whole", **options)
    trained(cls, tmp_path / "killed", kill_at=5, **options)
    again = trained(cls, tmp_path / "killed", **options)
    assert again.state.global_step == whole.state.global_step == 8
    assert weights(again) == weights(whole)
    assert losses(again) == losses(whole)
    assert len(losses(whole)) == 2
    if cls is WithCoefficient:
        assert again.coefficient == whole.coefficient == 1.5**8
    if cls is not LogsItself:
        plain = trained(Trainer, tmp_path / "plain", **options)
        assert losses(plain) == losses(whole)


def test_what_logs_itself_has_the_losses_and_files_of_another_run(tmp_path: Path) -> None:
    options = {"logging_steps": 2, "eval_strategy": "steps", "eval_steps": 4, "metric_for_best_model": "loss"}
    saves: list[int] = []

    class Notes(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            saves.append(state.global_step)

    rows, found = regression_rows(8), []
    for cls, name in ((LogsItself, "mine"), (Trainer, "plain")):
        args = arguments(tmp_path / name, **{**OPTIONS, **options})
        trainer = cls(
            Noisy(), args, train_dataset=rows, eval_dataset=rows, default_callbacks=False, callbacks=[Notes()]
        )
        trainer.train()
        found.append((trainer, sorted(path.name for path in (tmp_path / name / "run").glob("checkpoint-*")), saves[:]))
        saves.clear()
    mine, plain = found
    assert mine[1] == plain[1] == ["checkpoint-2", "checkpoint-4", "checkpoint-6", "checkpoint-8"]
    assert sorted(set(mine[2])) == sorted(set(plain[2])) == [2, 4, 6, 8]
    assert mine[2].count(2) == 1
    assert losses(mine[0]) == pytest.approx(losses(plain[0]), rel=1e-6)
    assert mine[0].state.best_metric == plain[0].state.best_metric
    assert all(record["mine"] == 1.0 for record in mine[0].state.log_history if "loss" in record)


def test_records_of_an_override_and_of_the_loop_follow_each_other(tmp_path: Path) -> None:
    class LogsByTurns(LogsItself):
        """Logs every other record itself before it calls `super()`, as ms-swift does."""

        def _maybe_log_save_evaluate(self, tr_loss: Any, *args: Any, **kwargs: Any) -> None:
            if self.state.global_step % 4 == 2:
                save, self.control.should_save = self.control.should_save, False
                super()._maybe_log_save_evaluate(tr_loss, *args, **kwargs)
                self.control.should_log, self.control.should_save = False, save
            Trainer._maybe_log_save_evaluate(self, tr_loss, *args, **kwargs)

    mine = trained(LogsByTurns, tmp_path / "mine", logging_steps=2)
    plain = trained(Trainer, tmp_path / "plain", logging_steps=2)
    assert losses(mine) == pytest.approx(losses(plain), rel=1e-6)
    assert [record.get("mine") for record in mine.state.log_history if "loss" in record] == [1.0, None, 1.0, None]
    assert sorted(path.name for path in (tmp_path / "mine/run").glob("checkpoint-*")) == [
        f"checkpoint-{step}" for step in (2, 4, 6, 8)
    ]


def test_a_run_with_overrides_is_rewound_to_the_same_bits(tmp_path: Path) -> None:
    trainer = trained(AllOfThem, tmp_path)
    with trainer.rewind(6) as past:
        assert past.comparison.steps == [5]
        assert past.comparison.is_equal, past.comparison.summary


def test_a_rollback_restores_what_an_override_keeps_beside_the_optimizer(tmp_path: Path) -> None:
    class Back(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 5 and not tried:
                tried.append(5)
                control.rollback("a test")

    tried: list[int] = []
    rows = regression_rows(16)
    args = arguments(tmp_path, **{**OPTIONS, "num_train_epochs": 1})
    trainer = WithCoefficient(Noisy(), args, train_dataset=rows, default_callbacks=False, callbacks=[Back()])
    trainer.train()
    assert tried == [5]
    assert trainer.coefficient == 1.5**trainer.state.global_step


def test_weights_under_other_names_keep_their_place_in_the_checkpoint(tmp_path: Path) -> None:
    trainer = trained(OwnWeights, tmp_path)
    checkpoint = tmp_path / "run" / "checkpoint-8"
    assert all(name.startswith("inner.") for name in load_file(checkpoint / "model.safetensors"))
    assert load_file(checkpoint / "model" / "model.safetensors").keys() == trainer.model.state_dict().keys()
    verify(checkpoint)
    again = trained(Trainer, tmp_path / "again", resume_from_checkpoint=str(checkpoint), num_train_epochs=3)
    assert again.state.global_step == 12


def test_a_method_assigned_to_a_class_of_the_library_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    original = Trainer._load_optimizer_and_scheduler

    def patched(self: Any, checkpoint: str | None) -> None:
        calls.append(os.path.basename(str(checkpoint)))
        original(self, checkpoint)

    whole = trained(Trainer, tmp_path / "whole")
    monkeypatch.setattr(Trainer, "_load_optimizer_and_scheduler", patched)
    trained(Trainer, tmp_path / "killed", kill_at=5)
    assert weights(trained(Trainer, tmp_path / "killed")) == weights(whole)
    assert calls == ["checkpoint-4"]


def test_the_loop_can_be_wrapped_and_knows_its_checkpoint(tmp_path: Path) -> None:
    class Wraps(Trainer):
        """Starts a worker around the loop, as TRL's asynchronous trainers do."""

        notes: list[Any]

        def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
            checkpoint = kwargs["resume_from_checkpoint"]
            self.notes = [None if checkpoint is None else os.path.basename(checkpoint), self.optimizer is None]
            try:
                return super()._inner_training_loop(*args, **kwargs)
            finally:
                self.notes.append("ended")

    assert trained(Wraps, tmp_path, kill_at=3).notes == [None, True, "ended"]
    again = trained(Wraps, tmp_path)
    assert again.notes == ["checkpoint-2", True, "ended"]
    assert weights(again) == weights(trained(Trainer, tmp_path / "plain"))
    with pytest.raises(ConfigError, match="_inner_training_loop is called by train"):
        Trainer._inner_training_loop(again)


def test_the_best_weights_are_loaded_by_the_override(tmp_path: Path) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    mine = trained(OwnWeights, tmp_path / "mine", **options)
    plain = trained(Trainer, tmp_path / "plain", **options)
    assert mine.state.best_global_step == plain.state.best_global_step
    assert weights(mine) == weights(plain)


def test_no_file_is_written_for_an_override_that_calls_super(tmp_path: Path) -> None:
    trained(WithCoefficient, tmp_path)
    names = {path.name for path in (tmp_path / "run" / "checkpoint-4").iterdir()}
    assert "coefficient.json" in names
    assert not names & {"optimizer.pt", "scheduler.pt", "rng_state.pth"}


def test_a_checkpoint_of_the_users_own_has_the_states_as_files(tmp_path: Path) -> None:
    class Own(Trainer):
        """Writes checkpoints itself, as axolotl does for quantized models."""

        def _save_checkpoint(self, model: Any, trial: Any = None, metrics: Any = None) -> None:
            directory = os.path.join(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}")
            os.makedirs(directory, exist_ok=True)
            self._save_optimizer_and_scheduler(directory)
            self._save_scaler(directory)
            self._save_rng_state(directory)

    trainer = trained(Own, tmp_path)
    names = {path.name for path in (tmp_path / "run" / "checkpoint-4").iterdir()}
    assert names == {"optimizer.pt", "scheduler.pt", "rng_state.pth"}
    state = torch.load(tmp_path / "run" / "checkpoint-8" / "optimizer.pt")
    assert state["param_groups"] == trainer.optimizer.state_dict()["param_groups"]


def test_with_save_only_model_no_state_is_saved(tmp_path: Path) -> None:
    trained(WithCoefficient, tmp_path, save_only_model=True)
    assert not (tmp_path / "run" / "checkpoint-4" / "coefficient.json").exists()


def test_weights_of_any_directory_can_be_loaded(tmp_path: Path) -> None:
    trainer = trained(Trainer, tmp_path)
    target = Noisy()
    trainer._load_from_checkpoint(str(tmp_path / "run" / "checkpoint-4"), target)
    saved = load_file(tmp_path / "run" / "checkpoint-4" / "model.safetensors")
    torch.testing.assert_close(dict(target.state_dict()), saved)
    trainer.save_model(str(tmp_path / "plain"))
    trainer._load_from_checkpoint(str(tmp_path / "plain"), target)
    torch.testing.assert_close(target.state_dict(), trainer.model.state_dict())
    with pytest.raises(FileNotFoundError, match="no weights in safetensors"):
        trainer._load_from_checkpoint(str(tmp_path), target)
    (tmp_path / "plain" / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(OnstepError, match=r"model.safetensors is not a complete safetensors file"):
        trainer._load_from_checkpoint(str(tmp_path / "plain"), target)


def test_an_override_that_replaces_the_model_is_refused(tmp_path: Path) -> None:
    class Replaces(Trainer):
        def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
            self.model = Noisy()

    trained(Trainer, tmp_path, kill_at=3)
    with pytest.raises(ConfigError, match=r"Replaces._load_from_checkpoint replaced trainer.model.*load_state_dict"):
        trained(Replaces, tmp_path)


def test_another_output_directory_is_refused_before_training(tmp_path: Path) -> None:
    class Elsewhere(Trainer):
        def _get_output_dir(self, trial: Any = None) -> str:
            return os.path.join(super()._get_output_dir(trial), "elsewhere")

    with pytest.raises(ConfigError, match=r"Elsewhere._get_output_dir returned '.*elsewhere'.*set output_dir="):
        trained(Elsewhere, tmp_path)


@pytest.mark.distributed
def test_two_ranks_continue_with_the_same_bits(processes: Processes, tmp_path: Path) -> None:
    def run(directory: str, kill_at: int | None) -> list[Any]:
        settings = {"name": "AllOfThem", "kill_at": kill_at}
        return processes.results("tests.support.jobs.state_override_jobs", "trains", tmp_path / directory, settings)

    whole = run("whole", None)
    run("killed", 3)
    assert run("killed", None) == whole
    assert whole[0] == whole[1]
