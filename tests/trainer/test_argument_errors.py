"""Errors that leave a Trainer advise arguments, not keys of the configuration."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from onstep import Trainer, TrainerCallback
from onstep.errors import AnomalyError, ConfigError, NonFiniteError, OnstepError
from onstep.trainer.reporting.argument_errors import in_arguments
from tests.support.small_models import Regression, arguments, quiet, regression_rows

SKIPPED = r"config_overrides\['train\.on_nonfinite'\]"


@pytest.mark.parametrize(
    ("overrides", "kind", "message"),
    [
        ({}, NonFiniteError, rf"{SKIPPED}='raise': .*lower learning_rate, or skip .* with {SKIPPED}='skip'\.$"),
        (
            {"train.on_nonfinite": "rollback"},
            AnomalyError,
            rf"save more often with save_steps, or skip such steps with {SKIPPED}='skip'\.$",
        ),
        ({"optimizer.lr": 0.1}, NonFiniteError, r"lower config_overrides\['optimizer\.lr'\], or skip"),
        ({"train.on_nonfinite": "maybe"}, ConfigError, rf"^{SKIPPED}"),
    ],
)
def test_a_loss_that_is_not_a_number_advises_arguments(
    tmp_path: Path, overrides: dict[str, Any], kind: type[OnstepError], message: str
) -> None:
    rows = regression_rows(8)
    rows[2]["labels"] = torch.tensor(float("nan"))
    args = arguments(
        tmp_path, save_strategy="steps", save_steps=50, config_overrides={"run.save_weights": False, **overrides}
    )
    with pytest.raises(kind, match=message) as caught:
        quiet(Regression(), args, rows).train()
    assert type(caught.value) is kind


@pytest.mark.parametrize("method", ["get_train_dataloader", "create_optimizer", "create_scheduler"])
def test_a_stop_iteration_of_an_overridden_method_names_it(tmp_path: Path, method: str) -> None:
    def exhausted(self: Any, *args: Any, **kwargs: Any) -> Any:
        return next(iter(()))

    kind = type("Own", (Trainer,), {method: exhausted})
    trainer = kind(Regression(), arguments(tmp_path), train_dataset=regression_rows(8))
    with pytest.raises(ConfigError, match=r"exhausted \(.*test_argument_errors.py:\d+\) raised StopIteration"):
        trainer.train()


def test_an_error_at_the_end_of_a_run_is_recorded_with_its_callback(tmp_path: Path) -> None:
    class Ends(TrainerCallback):
        def on_run_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            raise ValueError("a fault")

    args = arguments(tmp_path, save_strategy="no")
    with pytest.raises(ValueError, match="a fault"):
        Trainer(Regression(), args, train_dataset=regression_rows(8), callbacks=[Ends()]).train()
    record = json.loads((Path(str(args.output_dir)) / "run.json").read_text())
    assert record["status"] == "failed"
    assert record["error"] == "ValueError: a fault (raised by callback 'Ends' during 'on_run_end')"


def test_warnings_of_a_trainer_advise_arguments_and_those_of_others_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows, before = regression_rows(10), logging.getLogRecordFactory()
    args = arguments(tmp_path, dataloader_drop_last=True, eval_strategy="epoch", num_train_epochs=2)
    others = logging.getLogger("mine")

    class Says(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            others.warning("train.drop_last=false of mine")

    quiet(Regression(), args, rows, eval_dataset=iter(rows), callbacks=[Says()]).train()
    assert "dataloader_drop_last=False trains on them" in caplog.text
    assert "an iterator is read only once; pass a dataset, which starts over" in caplog.text
    assert "train.drop_last=false of mine" in caplog.text
    assert logging.getLogRecordFactory() is before


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (1, {"dataloader_drop_last": True}, "smaller per_device_train_batch_size .* or dataloader_drop_last=False$"),
        (8, {"max_steps": 10**5000}, r"max_steps=int with more than 4,300 digits"),
    ],
)
def test_errors_name_no_parameters_of_the_other_door(
    tmp_path: Path, rows: int, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(OnstepError, match=message):
        quiet(Regression(), arguments(tmp_path, **options), regression_rows(rows)).train()


def test_a_word_that_is_no_value_of_its_key_is_not_quoted() -> None:
    assert in_arguments("train.train_iters=int with more digits", {"train.train_iters": "iters"}) == (
        "iters=int with more digits"
    )
    assert in_arguments("run.name=mine is taken", {}) == "config_overrides['run.name']='mine' is taken"


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"fsdp_config": {"transformer_layer_cls_to_wrap": "Linea"}}, r"fsdp_config['transformer_layer_cls_to_wrap']"),
        ({"config_overrides": {"fsdp.wrap": ["Linea"]}}, "config_overrides['fsdp.wrap']"),
        ({"config_overrides": {"fsdp": {"wrap": ["Linea"]}}}, "config_overrides['fsdp.wrap']"),
    ],
)
def test_an_error_names_the_argument_by_which_blocks_were_named(
    tmp_path: Path, options: dict[str, Any], name: str
) -> None:
    args = arguments(tmp_path, fsdp="full_shard", **options)
    said = f"^{re.escape(name)} names 'Linea', .* Did you mean 'Linear'"
    with pytest.raises(ConfigError, match=said):
        quiet(Regression(), args, regression_rows(8)).train()
