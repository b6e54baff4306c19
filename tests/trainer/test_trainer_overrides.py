"""What a subclass overrides is called by the loop, or the subclass is refused."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from onstep import Trainer
from onstep.errors import ConfigError
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


def test_a_method_that_would_never_be_called_is_refused_by_name_with_a_remedy(tmp_path: Path) -> None:
    class OwnLoop(WithEpochs, Trainer):
        def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
            return None

    with pytest.raises(
        ValueError,
        match=r"OwnLoop overrides _inner_training_loop, _run_epoch, which Onstep's Trainer never calls.*"
        r"for _inner_training_loop: override training_step",
    ):
        OwnLoop(Regression(), arguments(tmp_path), train_dataset=regression_rows(4))


def test_every_method_of_transformers_exists_or_is_refused(tmp_path: Path) -> None:
    theirs = pytest.importorskip("transformers").Trainer
    names = [name for name, value in vars(theirs).items() if inspect.isfunction(value) and not name.startswith("__")]
    refusals: dict[str, str] = {}
    for name in names:
        subclass = type("Mine", (Trainer,), {name: lambda self, *args, **kwargs: None})
        try:
            subclass(Regression(), arguments(tmp_path), train_dataset=regression_rows(4))
        except ValueError as error:
            refusals[name] = str(error)
    assert all(name in text for name, text in refusals.items())
    assert [name for name in names if name not in refusals and not hasattr(Trainer, name)] == []


def test_methods_assigned_to_a_trainer_that_are_never_called_are_refused(tmp_path: Path) -> None:
    trainer = Trainer(Regression(), arguments(tmp_path), train_dataset=regression_rows(4), default_callbacks=False)
    trainer._inner_training_loop = lambda: None  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"Trainer overrides _inner_training_loop, which .* never calls"):
        trainer.train()
