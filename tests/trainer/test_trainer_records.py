"""The records of a Trainer, the methods that report them, and the files with metrics, compared with transformers."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.trainer_pt_utils import metrics_format

from onstep import JsonLogger, Trainer, TrainerCallback, TrainingArguments
from onstep.errors import ConfigError, MissingExtraError
from tests.support.small_models import Regression, arguments, causal_rows, quiet, qwen, regression_rows

pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")

EVERY_STEP = {"logging_steps": 1, "eval_strategy": "epoch", "num_train_epochs": 2}


class Heard(TrainerCallback):
    """Notes what reaches `on_log`."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []
        self.metrics: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append(dict(logs))

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        self.metrics.append(dict(metrics))


def kind(record: dict[str, Any]) -> str:
    return next((name for name in ("train_runtime", "eval_loss", "loss") if name in record), "other")


def trained(cls: type[Trainer], directory: Path, callbacks: Any = None, **options: Any) -> Trainer:
    args = arguments(directory, **{**EVERY_STEP, **options})
    rows = regression_rows(8)
    trainer = cls(
        Regression(), args, train_dataset=rows, eval_dataset=rows, callbacks=callbacks, default_callbacks=False
    )
    trainer.train()
    return trainer


def json_records(trainer: Trainer) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = json.loads((Path(str(trainer.args.output_dir)) / "trainer_logs.json").read_text())
    return records


ORDER = ["loss", "loss", "eval_loss", "loss", "loss", "eval_loss", "train_runtime"]


def test_an_overridden_log_is_called_for_every_record_and_what_it_passes_on_arrives(tmp_path: Path) -> None:
    class Marked(Trainer):
        def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
            seen.append((kind(logs), start_time is not None))
            super().log({**logs, "mark": len(seen)}, start_time)

    seen: list[Any] = []
    heard = Heard()
    trainer = trained(Marked, tmp_path, [heard, JsonLogger()])
    assert seen == [(name, name == "loss") for name in ORDER]
    numbered = list(zip(ORDER, range(1, 8), strict=True))
    assert [(kind(one), one["mark"]) for one in heard.logs] == numbered
    assert [(kind(one), one["mark"]) for one in trainer.state.log_history] == numbered
    assert [(kind(one), one["mark"]) for one in json_records(trainer) if "mark" in one] == numbered


def test_a_record_that_an_override_drops_reaches_nobody(tmp_path: Path) -> None:
    class Quiet(Trainer):
        def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
            if "loss" in logs:
                super().log(logs, start_time)

    heard = Heard()
    trainer = trained(Quiet, tmp_path, [heard, JsonLogger()])
    for records in (heard.logs, trainer.state.log_history, json_records(trainer)):
        assert [kind(one) for one in records] == ["loss"] * 4
    assert len(heard.metrics) == 2, "on_evaluate fires all the same, as in Hugging Face"


def test_a_log_that_is_assigned_is_called_too_and_may_have_the_old_signature(tmp_path: Path) -> None:
    trainer = quiet(Regression(), arguments(tmp_path, logging_steps=1), regression_rows(4))
    seen: list[str] = []
    trainer.log = lambda logs: seen.append(kind(logs))  # type: ignore[assignment,misc]
    trainer.train()
    assert seen == ["loss", "train_runtime"]


def test_evaluations_are_heard_at_on_log_as_in_transformers(tmp_path: Path) -> None:
    class Theirs(transformers.TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.order: list[str] = []

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            self.order.append("log " + kind(logs))

        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.order.append("evaluate")

    ours, theirs = Theirs(), Theirs()
    trained(Trainer, tmp_path, [ours])
    args = transformers.TrainingArguments(
        str(tmp_path / "theirs"), per_device_train_batch_size=4, use_cpu=True, report_to="none", **EVERY_STEP
    )
    rows = regression_rows(8)
    reference = transformers.Trainer(Regression(), args, train_dataset=rows, eval_dataset=rows, callbacks=[theirs])
    reference.remove_callback(transformers.trainer_callback.PrinterCallback)
    reference.remove_callback(transformers.trainer_callback.ProgressCallback)
    reference.train()
    assert ours.order == theirs.order


def test_the_metrics_log_and_trackers_have_each_evaluation_once(tmp_path: Path) -> None:
    trainer = trained(Trainer, tmp_path, [JsonLogger()], report_to="csv")
    assert [kind(one) for one in json_records(trainer)] == ORDER
    (table,) = tmp_path.rglob("metrics.csv")
    head, *rows = (line.split(",") for line in table.read_text().splitlines())
    assert sum(bool(row[head.index("eval_loss")]) for row in rows) == 2


def test_a_record_may_be_logged_after_the_run(tmp_path: Path) -> None:
    trainer = trained(Trainer, tmp_path, [JsonLogger()])
    trainer.log({"mine": 3.0})
    assert trainer.state.log_history[-1]["mine"] == json_records(trainer)[-1]["mine"] == 3.0


def test_before_the_first_run_there_is_nothing_to_log_to(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Trainer\.log requires a run"):
        quiet(Regression(), arguments(tmp_path)).log({"mine": 1.0})


def both_trained(directory: Path, **options: Any) -> tuple[Trainer, Any, Any, Any]:
    """The same run here and in transformers: both trainers, and what `train()` returned."""
    shared: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "num_train_epochs": 2,
        "logging_steps": 4,
        "learning_rate": 0.01,
        "train_sampling_strategy": "sequential",
        "use_cpu": True,
        "optim": "adamw_torch",
        **options,
    }
    rows = causal_rows(12)
    ours = quiet(qwen(), arguments(directory, **shared), rows, eval_dataset=rows[:4])
    args = transformers.TrainingArguments(
        str(directory / "theirs"), report_to="none", save_strategy="no", disable_tqdm=True, **shared
    )
    theirs = transformers.Trainer(qwen(), args, train_dataset=rows, eval_dataset=rows[:4])
    theirs.remove_callback(transformers.PrinterCallback)
    return ours, theirs, ours.train(), theirs.train()


def test_the_final_record_has_the_names_of_transformers_and_its_train_loss(tmp_path: Path) -> None:
    ours, theirs, found, expected = both_trained(tmp_path)
    assert expected.metrics.keys() <= found.metrics.keys()
    assert {"train_loss", "total_flos", "train_runtime", "epoch"} <= expected.metrics.keys()
    assert theirs.state.log_history[-1].keys() <= ours.state.log_history[-1].keys()
    assert found.training_loss == pytest.approx(expected.training_loss, rel=1e-5)
    for name in ("train_loss", "epoch"):
        assert ours.state.log_history[-1][name] == pytest.approx(expected.metrics[name], rel=1e-5)
    assert found.metrics["total_flos"] == ours.state.total_flos > 0


def test_metrics_are_printed_and_saved_as_by_transformers(tmp_path: Path, capsys: Any) -> None:
    ours, theirs, _, _ = both_trained(tmp_path, max_steps=2)
    metrics = {
        "train_loss": 1.234567,
        "train_runtime": 3725.678,
        "total_flos": 3e12,
        "epoch": 2.0,
        "train_samples": 12,
        "init_mem_cpu_alloc_delta": 5 << 20,
    }
    capsys.readouterr()
    for trainer in (theirs, ours):
        trainer.log_metrics("train", metrics)
    printed = capsys.readouterr().out.splitlines()
    assert printed[: len(printed) // 2] == printed[len(printed) // 2 :]
    assert ours.metrics_format(metrics) == metrics_format(metrics)
    for trainer in (theirs, ours):
        trainer.save_metrics("train", metrics)
        trainer.save_metrics("eval", {"eval_loss": 2.0, "epoch": 3.0})
        trainer.save_metrics("test", {"test_loss": 1.0}, combined=False)
    for name in ("train", "eval", "test", "all"):
        file = f"{name}_results.json"
        assert (tmp_path / "run" / file).read_text() == (tmp_path / "theirs" / file).read_text()


def test_the_state_is_saved_where_transformers_reads_it(tmp_path: Path) -> None:
    trainer = trained(Trainer, tmp_path)
    trainer.save_state()
    state = transformers.TrainerState.load_from_json(str(tmp_path / "run" / "trainer_state.json"))
    assert (state.global_step, state.epoch, state.max_steps) == (4, 2.0, 4)
    assert [kind(one) for one in state.log_history] == ORDER


def test_only_rank_0_prints_and_writes_metrics(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = quiet(Regression(), arguments(tmp_path))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    trainer.log_metrics("eval", {"eval_loss": 1.0})
    trainer.save_metrics("eval", {"eval_loss": 1.0})
    trainer.create_model_card()
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "run").exists()
    assert [trainer.is_world_process_zero(), trainer.is_local_process_zero()] == [False, False]


def test_flops_are_those_that_an_override_counts(tmp_path: Path) -> None:
    class Counting(Trainer):
        def floating_point_ops(self, inputs: Any) -> int:
            return 1000 * len(inputs["x"])

    trainer = trained(Counting, tmp_path, save_strategy="steps", save_steps=3)
    assert trainer.state.total_flos == 1000 * 16
    assert trainer.state.log_history[-1]["total_flos"] == 1000 * 16


def test_flops_by_the_default_formula_are_those_of_transformers(tmp_path: Path) -> None:
    inputs = {"input_ids": torch.ones(3, 7, dtype=torch.long)}
    model = qwen()
    args = transformers.TrainingArguments(str(tmp_path / "theirs"), report_to="none", use_cpu=True)
    theirs = transformers.Trainer(model, args)
    ours = quiet(model, arguments(tmp_path))
    assert ours.floating_point_ops(inputs) == theirs.floating_point_ops(inputs) > 0
    assert ours.floating_point_ops({}) == theirs.floating_point_ops({}) == 0


@pytest.mark.parametrize("given", ["all", "non_padding", True, "true"])
def test_input_tokens_are_counted_as_by_transformers(tmp_path: Path, given: Any) -> None:
    theirs_given = True if given == "true" else given
    rows = causal_rows(12)
    counted = []
    for name, kind_given in (("theirs", theirs_given), ("run", given)):
        options: dict[str, Any] = {
            "per_device_train_batch_size": 2,
            "max_steps": 4,
            "logging_steps": 2,
            "train_sampling_strategy": "sequential",
            "use_cpu": True,
            "include_num_input_tokens_seen": kind_given,
        }
        if name == "run":
            trainer: Any = quiet(qwen(), arguments(tmp_path, **options), rows)
        else:
            args = transformers.TrainingArguments(
                str(tmp_path / name), report_to="none", save_strategy="no", disable_tqdm=True, **options
            )
            trainer = transformers.Trainer(qwen(), args, train_dataset=rows)
            trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        history = [record["num_input_tokens_seen"] for record in trainer.state.log_history]
        counted.append((history, trainer.state.num_input_tokens_seen))
        assert "train_tokens_per_second" in trainer.state.log_history[0]
    assert counted[0] == counted[1]
    assert len(counted[0][0]) == 3


def test_a_continued_run_continues_the_count_of_input_tokens(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "logging_steps": 3,
        "save_steps": 2,
        "include_num_input_tokens_seen": True,
    }

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                raise KeyboardInterrupt

    first = quiet(qwen(), arguments(tmp_path, max_steps=4, **options), causal_rows(12), callbacks=[Stop()])
    with pytest.raises(KeyboardInterrupt):
        first.train()
    second = quiet(qwen(), arguments(tmp_path, max_steps=4, **options), causal_rows(12))
    second.train(resume_from_checkpoint=None)
    assert second.state.num_input_tokens_seen == 4 * 2 * 10


def test_memory_is_measured_under_the_names_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("psutil")
    ours, theirs, found, expected = both_trained(tmp_path, max_steps=2, skip_memory_metrics=False)

    def memory(metrics: Any) -> set[str]:
        return {name for name in metrics if "_mem_" in name}

    assert memory(found.metrics) == memory(expected.metrics)
    assert memory(ours.state.log_history[-1]) == memory(theirs.state.log_history[-1])
    assert memory(ours.evaluate()) == memory(theirs.evaluate())
    rows = causal_rows(4)
    assert memory(ours.predict(rows).metrics) == memory(theirs.predict(rows).metrics)
    assert all(found.metrics[name] >= 0 for name in memory(found.metrics) if name.endswith("peaked_delta"))
    assert found.metrics["before_init_mem_cpu"] > 1 << 20


def test_memory_metrics_without_psutil_are_refused_with_the_command(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)
    with pytest.raises(MissingExtraError, match=r"skip_memory_metrics=False requires psutil.*pip install"):
        quiet(Regression(), arguments(tmp_path, skip_memory_metrics=False))


def test_memory_is_not_measured_by_default(tmp_path: Path) -> None:
    assert not [name for name in trained(Trainer, tmp_path).state.log_history[-1] if "_mem_" in name]


def test_save_on_each_node_is_for_one_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    TrainingArguments(str(tmp_path), save_on_each_node=True)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"save_on_each_node=True .* several machines"):
        TrainingArguments(str(tmp_path), save_on_each_node=True)


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("save_safetensors", False, r"torch\.save"),
        ("trackio_static_space_id", "me/space", "trackio freeze"),
    ],
)
def test_arguments_that_stay_refused_say_what_to_do(tmp_path: Path, name: str, value: Any, remedy: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}=.*{remedy}"):
        TrainingArguments(str(tmp_path), **{name: value})


@pytest.mark.parametrize("filters", [True, False])
def test_skipped_losses_are_filtered_from_the_log_or_not(tmp_path: Path, filters: bool) -> None:
    rows = regression_rows(8)
    rows[2]["labels"] = torch.tensor(float("nan"))
    overrides = {"run.save_weights": False, "train.on_nonfinite": "skip"}
    args = arguments(tmp_path, logging_steps=2, logging_nan_inf_filter=filters, config_overrides=overrides)
    trainer = quiet(Regression(), args, rows)
    trainer.train()
    (logged,) = [one for one in trainer.state.log_history if "learning_rate" in one]
    assert math.isfinite(logged["loss"]) is filters
