"""The figures of a run, and how they are shown."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from onstep.analysis import (
    TrainingLog,
    compute_summary_statistics,
    format_summary_json,
    format_summary_markdown,
    format_summary_oneline,
    format_summary_text,
    get_perplexity,
)

TRAINING = [
    {"global_step": 10, "epoch": 0.1, "loss": 3.0, "learning_rate": 1e-3},
    {"global_step": 20, "epoch": 0.2, "loss": 2.0, "grad_norm": 1.0, "learning_rate": 8e-4},
    {"global_step": 30, "epoch": 0.3, "loss": 2.5, "grad_norm": 4.0, "learning_rate": 5e-4},
    {"global_step": 40, "epoch": 0.4, "loss": 2.25, "grad_norm": 2.5},
]
EVALUATIONS = [
    {"global_step": 20, "eval_loss": 2.0},
    {"global_step": 40, "eval_loss": 2.5},
]
FINAL = {
    "global_step": 40,
    "train_runtime": 3725.4,
    "train_samples": 3200,
    "train_samples_per_second": 0.86,
    "train_steps_per_second": 0.01,
    "effective_batch_size": 80,
}


def summary_of(
    *records: dict[str, Any], path: str = "output_models/gpt/runs/first/trainer_logs.json"
) -> dict[str, Any]:
    return compute_summary_statistics(TrainingLog(Path(path), list(records)))


@pytest.fixture
def whole() -> dict[str, Any]:
    return summary_of(*TRAINING, *EVALUATIONS, FINAL)


def test_summary_of_a_whole_run(whole: dict[str, Any]) -> None:
    assert whole == {
        "run_name": "first",
        "log_path": "output_models/gpt/runs/first/trainer_logs.json",
        "total_steps": 40,
        "final_epoch": 0.4,
        "final_loss": 2.25,
        "avg_loss": 2.4375,
        "min_loss": 2.0,
        "best_loss": 2.0,
        "best_loss_step": 20,
        "avg_grad_norm": 2.5,
        "max_grad_norm_value": 4.0,
        "max_grad_norm_step": 30,
        "initial_lr": 1e-3,
        "final_lr": 5e-4,
        "final_eval_loss": 2.5,
        "final_eval_loss_step": 40,
        "best_eval_loss": 2.0,
        "best_eval_loss_step": 20,
        **{key: value for key, value in FINAL.items() if key != "global_step"},
    }


def test_file_and_list_give_the_same_summary(whole: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "trainer_logs.json"
    path.write_text("[\n" + ",\n".join(map(json.dumps, [*TRAINING, *EVALUATIONS, FINAL])) + "\n]")
    found = compute_summary_statistics(TrainingLog.from_file(path))
    assert {**found, "run_name": "first", "log_path": whole["log_path"]} == whole


def test_what_is_missing_has_no_key() -> None:
    nothing = {"run_name": None, "log_path": "x.json", "notes": ["the log has no records yet"]}
    assert summary_of(path="x.json") == nothing
    assert set(summary_of({"loss": 1.0})) == {
        "run_name",
        "log_path",
        "final_loss",
        "avg_loss",
        "min_loss",
        "best_loss",
    }


def test_nan_and_infinite_values_spoil_nothing_and_are_counted() -> None:
    losses = [math.nan, 3.0, 2.0, math.inf, math.nan]
    records = [{"global_step": step, "loss": loss, "grad_norm": 1 / loss} for step, loss in enumerate(losses)]
    found = summary_of(*records, {"global_step": 4, "eval_loss": math.nan})
    assert (found["min_loss"], found["best_loss"], found["best_loss_step"], found["avg_loss"]) == (2.0, 2.0, 2, 2.5)
    assert math.isnan(found["final_loss"])
    assert (found["nonfinite_losses"], found["nonfinite_grad_norms"], found["nonfinite_eval_losses"]) == (3, 2, 1)
    assert found["max_grad_norm_step"] == 2
    assert "best_eval_loss" not in found


def test_diverged_run_without_a_finite_loss_has_no_best() -> None:
    found = summary_of({"global_step": 1, "loss": math.nan})
    assert "best_loss" not in found
    assert "NaN or Infinite Losses:  1" in format_summary_text(found)
    assert json.loads(format_summary_json(found))["final_loss"] is None


def test_perplexity_is_infinite_where_a_float_ends() -> None:
    assert get_perplexity(0.0) == 1.0
    assert get_perplexity(1000.0) == math.inf
    assert math.isnan(get_perplexity(math.nan))


@pytest.mark.parametrize("form", [format_summary_text, format_summary_markdown])
def test_last_and_best_evaluation_are_told_apart(form: Any, whole: dict[str, Any]) -> None:
    lines = form(whole).splitlines()
    final = next(line for line in lines if "Final Eval Loss" in line)
    best = next(line for line in lines if "Best Eval Loss" in line)
    assert "2.5000" in final
    assert "40" in final
    assert "2.0000" in best
    assert "20" in best


def test_text_has_its_sections(whole: dict[str, Any]) -> None:
    text = format_summary_text(whole)
    for title in ("Summary of first", "Metrics", "Training Speed", "Gradient Statistics", "Learning Rate"):
        assert title in text.splitlines(), title
    assert "1:02:05" in text
    assert "Training Speed" not in format_summary_text(summary_of(*TRAINING))


def test_markdown_has_a_table_with_steps(whole: dict[str, Any]) -> None:
    lines = format_summary_markdown(whole).splitlines()
    assert "| Metric | Value | Step |" in lines
    assert "| Best Loss | 2.0000 | 20 |" in lines
    assert any(line.startswith("- Gradient Statistics: Largest Norm 4 (step 30)") for line in lines)


def test_several_summaries_are_a_json_array(whole: dict[str, Any]) -> None:
    assert json.loads(format_summary_json(whole)) == whole
    assert json.loads(format_summary_json([whole, whole])) == [whole, whole]


def test_one_line_shows_hours(whole: dict[str, Any]) -> None:
    line = "first                            | steps=40 | time=1:02:05 | loss=2.2500 | eval=2.0000 | samp/s=0.9"
    assert format_summary_oneline(whole) == line


def test_one_line_of_a_nameless_running_log() -> None:
    line = format_summary_oneline(summary_of({"loss": 1.0}, path="some_dir/trainer_logs.json"))
    assert line.startswith("some_dir      ")
    assert line.endswith("| steps=N/A | time=N/A | loss=1.0000 | eval=N/A | samp/s=N/A")


def test_one_line_cuts_a_long_name(whole: dict[str, Any]) -> None:
    line = format_summary_oneline({**whole, "run_name": "n" * 50})
    assert line.startswith("n" * 30 + "   | ")


def test_branch_that_the_run_left_does_not_count() -> None:
    left = [{"global_step": step, "loss": 1.0, "grad_norm": 9.0} for step in range(1, 101)]
    left += [{"global_step": 100, "eval_loss": 0.5}]
    newest = [{"global_step": step, "loss": 2.0, "grad_norm": 1.0} for step in range(81, 151)]
    found = summary_of(*left, *newest, {"global_step": 150, "eval_loss": 1.5})
    assert found["avg_loss"] == pytest.approx((80 * 1.0 + 70 * 2.0) / 150)
    assert found["avg_grad_norm"] == pytest.approx((80 * 9.0 + 70 * 1.0) / 150)
    assert (found["best_eval_loss"], found["best_eval_loss_step"]) == (1.5, 150)
    (note,) = found["notes"]
    assert "20 training records" in note
    assert f"note: {note}" in format_summary_text(found)
    assert f"note: {note}" in format_summary_markdown(found)
    assert "notes" not in summary_of(*left)


def test_evaluation_of_an_earlier_step_at_the_end_takes_no_training_away() -> None:
    records = [{"global_step": step, "loss": 1 / step} for step in range(1, 11)]
    found = summary_of(*records, {"global_step": 3, "eval_loss": 1.0})
    assert (found["best_loss_step"], found["best_eval_loss_step"]) == (10, 3)


def test_records_without_steps_count_all() -> None:
    assert summary_of({"loss": 1.0}, {"loss": 3.0})["avg_loss"] == 2.0


def test_log_without_losses_says_what_it_has() -> None:
    found = summary_of({"global_step": 1, "norms": {"a": 1.0}, "x\x1by": 2})
    assert found["notes"] == ["no record has loss or eval_loss; its keys are global_step, norms, x\x1by"]
    assert "its keys are global_step, norms, x?y" in format_summary_text(found)


def test_every_evaluation_set_is_shown() -> None:
    records = [
        {"global_step": 10, "loss": 3.0},
        {"global_step": 10, "eval_a_loss": 2.0},
        {"global_step": 10, "eval_b_loss": 4.0},
        {"global_step": 20, "eval_a_loss": 2.5},
        {"global_step": 20, "eval_b_loss": 3.5},
    ]
    found = summary_of(*records)
    assert found["eval_sets"]["a"] == {
        "final_eval_loss": 2.5,
        "final_eval_loss_step": 20,
        "best_eval_loss": 2.0,
        "best_eval_loss_step": 10,
    }
    lines = [" ".join(line.split()) for line in format_summary_text(found).splitlines()]
    assert "Best Eval Loss (a): 2.0000 (step 10)" in lines
    assert "Final Eval Loss (b): 3.5000 (step 20)" in lines
    assert "notes" not in summary_of(*records[1:])
