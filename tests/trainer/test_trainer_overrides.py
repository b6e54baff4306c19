"""What a subclass overrides is called by the loop, or the subclass is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from onstep import Trainer
from onstep.errors import ConfigError
from onstep.trainer.overrides import METHODS
from tests.support.small_models import Regression, arguments, regression_rows


def test_an_overridden_evaluate_is_called_during_training(tmp_path: Path) -> None:
    class Answers(Trainer):
        def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> Any:
            metrics = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
            return {**metrics, "eval_answers": float(self.state.global_step)}

    args = arguments(
        tmp_path, num_train_epochs=2, eval_strategy="epoch", metric_for_best_model="answers", greater_is_better=True
    )
    rows = regression_rows(4)
    trainer = Answers(Regression(), args, train_dataset=rows, eval_dataset=rows, default_callbacks=False)
    trainer.train()
    assert trainer.state.best_metric == trainer.state.global_step == 2


def test_an_overridden_save_model_writes_the_final_weights(tmp_path: Path) -> None:
    class Notes(Trainer):
        def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
            super().save_model(output_dir)
            Path(str(output_dir), "note.txt").write_text("mine")

    args = arguments(tmp_path, max_steps=1, config_overrides={})
    Notes(Regression(), args, train_dataset=regression_rows(4), default_callbacks=False).train()
    written = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"model.safetensors", "note.txt"} <= written


class WithEpochs:
    """A mixin, as libraries have them."""

    def _run_epoch(self, *args: Any, **kwargs: Any) -> Any:
        return None


def test_a_method_that_would_never_be_called_is_refused_by_name_when_a_training_needs_it(tmp_path: Path) -> None:
    class OwnLoop(WithEpochs, Trainer):
        def set_initial_training_values(self, *args: Any, **kwargs: Any) -> Any:
            return None

    trainer = OwnLoop(Regression(), arguments(tmp_path), train_dataset=regression_rows(4), default_callbacks=False)
    trainer.evaluate(regression_rows(4))
    with pytest.raises(
        ValueError,
        match=r"OwnLoop overrides _run_epoch, set_initial_training_values, which Onstep's Trainer never calls.*"
        r"for _run_epoch: override training_step.*for set_initial_training_values: set max_steps",
    ):
        trainer.train()


def test_deleting_checkpoints_by_a_method_of_transformers_4_is_refused_only_where_they_are_deleted(
    tmp_path: Path,
) -> None:
    class Keeps(Trainer):
        def _rotate_checkpoints(self, use_mtime: bool = False, output_dir: Any = None) -> None:
            return None

    rows, options = regression_rows(4), {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    limited = Keeps(Regression(), arguments(tmp_path, **options, save_total_limit=1), train_dataset=rows)
    with pytest.raises(ConfigError, match=r"Keeps overrides _rotate_checkpoints \(with save_total_limit\).*on_save"):
        limited.train()
    Keeps(Regression(), arguments(tmp_path, **options), train_dataset=rows, default_callbacks=False).train()
    assert len(list((tmp_path / "run").glob("checkpoint-*"))) == 2


def test_a_method_assigned_to_the_class_counts_as_an_override(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(Regression(), arguments(tmp_path), train_dataset=regression_rows(4), default_callbacks=False)
    monkeypatch.setattr(Trainer, "_run_epoch", WithEpochs._run_epoch, raising=False)
    with pytest.raises(ConfigError, match="overrides _run_epoch"):
        trainer.train()


def test_every_method_of_transformers_is_in_the_table() -> None:
    theirs = pytest.importorskip("transformers").Trainer
    names = {name for name, value in vars(theirs).items() if callable(value) and not name.startswith("__")}
    assert names - METHODS.keys() == set()
    assert METHODS.keys() - names == {"prediction_loop", "_rotate_checkpoints", "_sorted_checkpoints"}
    assert [name for name, one in METHODS.items() if one.called and not hasattr(Trainer, name)] == []


def test_the_table_can_be_read_without_torch() -> None:
    code = "import sys, onstep.trainer.overrides; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_methods_assigned_to_a_trainer_that_are_never_called_are_refused(tmp_path: Path) -> None:
    trainer = Trainer(Regression(), arguments(tmp_path), train_dataset=regression_rows(4), default_callbacks=False)
    trainer._run_epoch = lambda: None  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"Trainer overrides _run_epoch, which .* never calls"):
        trainer.train()
