"""Which columns there are, how overrides change them, and how rows are laid out."""

from __future__ import annotations

from dataclasses import astuple

import pytest

from onstep.console.formats import format_epoch
from onstep.console.table import (
    ColumnSpec,
    MetricSpec,
    default_final_metrics,
    default_step_columns,
    fitting_columns,
    header_line,
    in_two_columns,
    merge_specs,
    row_formatter,
    summary_lines,
    summary_title,
)


def test_default_columns_are_the_documented_ones() -> None:
    shown = [
        (name, column.key, column.heading().strip(), column.width, column.fmt, column.reduce)
        for name, column in default_step_columns().items()
    ]
    assert shown == [
        ("epoch", "epoch", "epoch", 6, format_epoch, None),
        ("loss", "loss", "loss", 8, ".5f", None),
        ("grad_norm", "grad_norm", "grad", 8, ".4f", None),
        ("learning_rate", "learning_rate", "lr", 8, ".2e", None),
        ("tokens", "tokens", "tokens", 8, ",d", None),
        ("total_tokens", "total_tokens", "total_tok", 9, "si", None),
        ("tok_per_sec", "tok_per_sec", "tok/s", 7, ",d", None),
        ("mfu", "mfu", "mfu", 5, ".1%", None),
        ("peak_mem", "peak_mem", "memory", 9, "gib", "max"),
    ]


def test_default_final_metrics_are_the_documented_ones() -> None:
    assert [astuple(metric) for metric in default_final_metrics().values()] == [
        ("train_runtime", "Runtime", ".2f", " s"),
        ("step", "Total steps", ",d", ""),
        ("train_samples", "Total samples", ",d", ""),
        ("effective_batch_size", "Effective batch size", ",d", ""),
        ("train_samples_per_second", "Samples/sec", ".3f", ""),
        ("train_steps_per_second", "Steps/sec", ".3f", ""),
        ("epoch", "Epoch", ".6g", ""),
        ("total_tokens", "Total tokens", ",d", ""),
        ("tokens_per_second", "Tokens/sec", ",.0f", ""),
        ("total_flops", "Total FLOPs", ".3e", ""),
        ("flops_per_second", "FLOPs/sec", ".3e", ""),
    ]


def test_spec_defaults() -> None:
    assert astuple(ColumnSpec("a")) == ("a", "", 10, "", None)
    assert ColumnSpec("a").heading() == "         a"
    assert astuple(MetricSpec("a")) == ("a", "", "", "")


def test_override_changes_single_fields_and_keeps_the_order() -> None:
    merged = merge_specs(default_step_columns(), {"loss": {"fmt": ".2f"}, "mfu": None, "my_metric": {}}, ColumnSpec)
    assert list(merged) == [name for name in default_step_columns() if name != "mfu"] + ["my_metric"]
    assert merged["loss"] == ColumnSpec("loss", width=8, fmt=".2f")
    assert merged["my_metric"] == ColumnSpec("my_metric", "my_metric")


def test_override_may_be_a_spec_and_erasing_the_unknown_is_harmless() -> None:
    spec = ColumnSpec("loss", "Loss!", 12)
    merged = merge_specs(default_step_columns(), {"loss": spec, "nothing": None}, ColumnSpec)
    assert merged["loss"] is spec
    assert list(merged) == list(default_step_columns())


def test_nested_key_lets_two_columns_show_one_metric() -> None:
    merged = merge_specs(
        {}, {"mem_max": {"key": "peak", "reduce": "max"}, "mem_all": {"key": "peak", "reduce": "all"}}, ColumnSpec
    )
    columns = [*merged.values()]
    assert header_line(columns) == "    step  split     mem_max     mem_all"
    assert row_formatter(columns)(5, "train", {"peak": [1, 2]}) == "       5  train           2         1/2"


def test_an_evaluation_has_a_row_of_the_same_table() -> None:
    row = row_formatter([default_step_columns()[name] for name in ("epoch", "loss", "learning_rate")])
    train, test = {"epoch": 0.5, "loss": 2.5, "learning_rate": 1e-3}, {"epoch": 0.5, "loss": 2.75}
    assert [row(1000, "train", train), row(1000, "test", test)] == [
        "   1,000  train  0.5000   2.50000  1.00e-03",
        "   1,000  test   0.5000   2.75000",
    ]


def test_a_line_is_not_wider_than_a_terminal_and_columns_of_the_user_stay() -> None:
    mine = ColumnSpec("mine", width=20)
    columns = [*default_step_columns().values(), mine]
    fitting = fitting_columns(columns, 80)
    assert len(header_line(fitting)) <= 80
    assert mine in fitting
    assert {"loss", "grad_norm", "learning_rate"} < {column.key for column in fitting}
    assert fitting_columns(columns, 200) == columns


def test_override_of_another_type_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="'loss' must be a dictionary, a ColumnSpec or None"):
        merge_specs(default_step_columns(), {"loss": ".2f"}, ColumnSpec)
    with pytest.raises(TypeError, match="MetricSpec"):
        merge_specs(default_final_metrics(), {"epoch": ColumnSpec("epoch")}, MetricSpec)


def test_mistyped_field_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"no field 'widht'\. Did you mean 'width'"):
        merge_specs(default_step_columns(), {"loss": {"widht": 3}}, ColumnSpec)


@pytest.mark.parametrize("wrong", [{"fmt": "5q"}, {"reduce": "median"}])
def test_wrong_format_or_reduction_is_refused_before_training(wrong: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        merge_specs(default_step_columns(), {"loss": wrong}, ColumnSpec)


def test_summary_has_known_metrics_in_order_then_the_rest() -> None:
    logs = {"extra": 3, "step": 1200, "train_runtime": 61.5, "train_steps_per_second": float("nan")}
    assert summary_lines(default_final_metrics(), logs) == [
        "  Runtime:                61.50 s",
        "  Total steps:            1,200",
        "  Steps/sec:              nan",
        "  extra:                  3",
    ]


def test_summary_of_a_run_too_short_to_time_shows_none() -> None:
    assert summary_lines(default_final_metrics(), {"train_runtime": None}) == ["  Runtime:                None"]


def test_erased_final_metric_stays_hidden() -> None:
    metrics = merge_specs(default_final_metrics(), {"total_flops": None}, MetricSpec)
    assert summary_lines(metrics, {"total_flops": 1e12, "step": 1}) == ["  Total steps:            1"]


def test_a_model_without_tokens_has_no_lines_about_them() -> None:
    logs = {"step": 3, "total_tokens": 0, "tokens_per_second": 0.0, "total_flops": 0.0, "flops_per_second": 0.0}
    assert summary_lines(default_final_metrics(), logs) == ["  Total steps:            3"]


def test_the_title_of_the_summary_shows_the_first_and_the_last_loss() -> None:
    assert summary_title({"first_loss": 5.5, "last_loss": 2.25}).endswith(": loss 5.5 at the start, 2.25 at the end")
    assert summary_title({}) == "Training complete:"
    assert summary_title({"step": 1200}, is_complete=False) == "Training stopped at step 1,200:"


def test_many_lines_of_a_summary_are_side_by_side_if_they_fit() -> None:
    lines = [f"  {name}: 1" for name in "abcde"]
    assert in_two_columns(lines, 80) == ["  a: 1  d: 1", "  b: 1  e: 1", "  c: 1"]
    assert in_two_columns(lines, 11) == lines
    assert in_two_columns(lines[:4], 80) == lines[:4]
