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


CALLED_BY_SCRIPTS = {
    "add_callback",
    "create_model_card",
    "end",
    "get_cp_size",
    "get_learning_rates",
    "get_num_trainable_parameters",
    "get_optimizer_group",
    "get_sp_size",
    "get_tp_size",
    "hyperparameter_search",
    "init_hf_repo",
    "is_local_process_zero",
    "is_world_process_zero",
    "log_metrics",
    "metrics_format",
    "pop_callback",
    "push_to_hub",
    "remove_callback",
    "save_metrics",
    "save_state",
}
"""Methods that only a script calls: there, an override is what runs."""


class WithSampler:
    """A mixin, as libraries have them."""

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        return None


def test_a_method_that_would_never_be_called_is_refused_by_name_with_a_remedy(tmp_path: Path) -> None:
    class Groups(WithSampler, Trainer):
        def create_optimizer(self) -> Any:
            return None

    with pytest.raises(
        ValueError,
        match=r"Groups overrides create_optimizer, _get_train_sampler, which Onstep's Trainer never calls.*"
        r"for create_optimizer: pass a factory",
    ):
        Groups(Regression(), arguments(tmp_path), train_dataset=regression_rows(4))


def test_every_method_of_transformers_is_called_or_refused(tmp_path: Path) -> None:
    theirs = pytest.importorskip("transformers").Trainer
    names = [name for name, value in vars(theirs).items() if inspect.isfunction(value) and not name.startswith("__")]
    silent: list[str] = []
    refusals: dict[str, str] = {}
    for name in names:
        subclass = type("Mine", (Trainer,), {name: lambda self, *args, **kwargs: None})
        try:
            subclass(Regression(), arguments(tmp_path), train_dataset=regression_rows(4))
            silent.append(name)
        except ValueError as error:
            refusals[name] = str(error)
    called = {"train", "compute_loss", "evaluate", "predict", "save_model"}
    assert all(f"Mine overrides {name}, which" in text for name, text in refusals.items())
    assert set(silent) == called | CALLED_BY_SCRIPTS


def test_methods_assigned_to_a_trainer_that_are_never_called_are_refused(tmp_path: Path) -> None:
    trainer = Trainer(Regression(), arguments(tmp_path), train_dataset=regression_rows(4), default_callbacks=False)
    trainer.create_optimizer = lambda: None  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"Trainer overrides create_optimizer, which .* never calls.*optimizers="):
        trainer.train()
