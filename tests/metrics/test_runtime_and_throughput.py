"""Rates and remaining time, by numbers worked out by hand."""

from __future__ import annotations

import pytest

from onstep.config import TrainingConfig
from onstep.errors import ConfigError
from onstep.metrics import report_runtime, report_throughput
from onstep.train_state import TrainState


def test_runtime_extends_the_pace_so_far_to_the_whole_run() -> None:
    progress = TrainState(step=250, consumed_train_samples=2000)
    report = report_runtime(progress, 1000.0, 128, 1000, now=1500.0)
    assert report == {
        "time/remaining_estimate": 1500.0,  # 2 s a step, 750 steps left
        "time/tokens": 256_000,
        "time/samples": 2000,
        "time/batches": 250,
        "time/total": 500.0,
    }


def test_the_estimate_of_a_resumed_run_counts_the_steps_of_this_process() -> None:
    progress = TrainState(step=900)
    report = report_runtime(progress, 0.0, 1, 1000, start_step=800, now=100.0)
    assert report["time/remaining_estimate"] == pytest.approx(100.0)  # 100 steps took 100 s, 100 are left
    naive = report_runtime(progress, 0.0, 1, 1000, now=100.0)
    assert naive["time/remaining_estimate"] == pytest.approx(100 / 9)


@pytest.mark.parametrize(("unit", "seconds"), [("seconds", 1), ("minutes", 60), ("hours", 3600), ("days", 86400)])
def test_units(unit: str, seconds: int) -> None:
    report = report_runtime(TrainState(step=1), 0.0, 1, 3, unit, now=7200.0)
    assert report["time/total"] == pytest.approx(7200 / seconds)
    assert report["time/remaining_estimate"] == pytest.approx(14400 / seconds)


def test_an_unknown_unit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"seconds, minutes, hours, days, got 'weeks'"):
        report_runtime(TrainState(step=1), 0.0, 1, 3, "weeks")


def test_nothing_is_estimated_before_the_first_step() -> None:
    report = report_runtime(TrainState(step=5), 0.0, 1, 10, start_step=5, now=3.0)
    assert "time/remaining_estimate" not in report
    assert report["time/total"] == 3.0


def test_a_run_past_its_end_has_nothing_left() -> None:
    assert report_runtime(TrainState(step=12), 0.0, 1, 10, now=3.0)["time/remaining_estimate"] == 0


def test_the_clock_is_read_where_no_time_is_given() -> None:
    assert report_runtime(TrainState(step=1), 0.0, 1, 10)["time/total"] > 1e9


CONFIG = TrainingConfig(micro_batch_size=2, global_batch_size=16)


def test_throughput_is_the_formula_over_the_window() -> None:
    report = report_throughput(CONFIG, 5, 32, [1.0, 2.0, 3.5, 4.0, 6.0], 5, world_size=4)
    assert report == {
        "throughput/batches_per_sec": pytest.approx(0.8),  # 4 steps in 5 s
        "throughput/samples_per_sec": pytest.approx(12.8),
        "throughput/tokens_per_sec": pytest.approx(409.6),
        "throughput/device/batches_per_sec": pytest.approx(0.2),
        "throughput/device/samples_per_sec": pytest.approx(3.2),
        "throughput/device/tokens_per_sec": pytest.approx(102.4),
        "throughput/micro_batch_size": 2,
        "throughput/global_batch_size": 16,
    }


def test_the_batch_that_was_run_counts() -> None:
    report = report_throughput(CONFIG, 5, 32, [0.0, 1.0, 2.0], 3, batch_size=4)
    assert report["throughput/samples_per_sec"] == pytest.approx(4.0)
    assert report["throughput/global_batch_size"] == 4


def test_nothing_before_the_window_is_full_and_no_tokens_without_a_length() -> None:
    assert report_throughput(CONFIG, 2, 32, [0.0, 1.0], 3) == {}
    assert report_throughput(CONFIG, 2, 32, [], 0) == {}
    report = report_throughput(CONFIG, 3, 0, [0.0, 1.0, 2.0], 3)
    assert "throughput/tokens_per_sec" not in report
    assert "throughput/device/tokens_per_sec" not in report


def test_no_time_is_no_rate(capsys: pytest.CaptureFixture[str]) -> None:
    assert report_throughput(CONFIG, 7, 32, [3.0, 3.0], 2) == {}
    warning = "Warning: elapsed_wct is 0.0, skipping throughput calculation at iteration 7\n"
    assert capsys.readouterr().out == warning


def test_a_throughput_needs_a_batch_size() -> None:
    with pytest.raises(ConfigError, match="global_batch_size is None"):
        report_throughput(TrainingConfig(), 3, 32, [0.0, 1.0], 2)
