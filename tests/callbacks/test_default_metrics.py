"""Derived metrics, computed by hand with a clock that the test turns."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from onstep.callbacks import DefaultMetrics


class Clock:
    """Seconds, moved by hand."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class Run:
    """Tells one DefaultMetrics what a loop would."""

    def __init__(self, make_state: Any, peak: float | None = None, **state: Any) -> None:
        self.clock = Clock()
        self.metrics = DefaultMetrics(peak)
        self.metrics.clock = self.clock
        self.state = make_state(**state)
        self.metrics.on_train_begin(args=None, state=self.state, control=None)

    def step(self, seconds: float) -> None:
        self.metrics.on_step_begin(args=None, state=self.state, control=None)
        self.clock.now += seconds
        self.metrics.on_step_end(args=None, state=self.state, control=None)

    def log(self, **logs: Any) -> dict[str, Any]:
        self.metrics.on_log_step(args=None, state=self.state, control=None, logs=logs)
        return logs


def test_signature_is_the_documented_one() -> None:
    (parameter,) = inspect.signature(DefaultMetrics).parameters.values()
    assert (parameter.name, parameter.default) == ("peak_hardware_flops", None)


def test_tokens_per_second_of_wall_clock_from_the_second_log_on(make_state: Any) -> None:
    run = Run(make_state)
    run.step(1.0)
    assert run.log(tokens=500) == {"tokens": 500}
    run.step(2.0)
    run.clock.now += 1.0  # an evaluation
    logs = run.log(tokens=1000)
    assert logs == {"tokens": 1000, "tok_per_sec": 333}
    assert type(logs["tok_per_sec"]) is int


def test_utilization_counts_time_inside_steps_only_and_from_the_first_log(make_state: Any) -> None:
    run = Run(make_state, peak=1000.0)
    run.step(2.0)
    run.clock.now += 50.0
    run.step(2.0)
    assert run.log(total_flos=2000.0)["mfu"] == pytest.approx(2000 / 4 / 1000)
    run.step(1.0)
    assert run.log(total_flos=2500.0)["mfu"] == pytest.approx(500 / 1 / 1000)


def test_resumed_run_starts_from_the_restored_flops(make_state: Any) -> None:
    run = Run(make_state, peak=1000.0, floating_point_operations_so_far=1e9)
    run.step(1.0)
    assert run.log(total_flos=1e9 + 300)["mfu"] == pytest.approx(0.3)


@pytest.mark.parametrize("peak", [None, 0.0])
def test_no_utilization_without_a_peak(make_state: Any, peak: float | None) -> None:
    run = Run(make_state, peak=peak)
    run.step(1.0)
    assert "mfu" not in run.log(total_flos=100.0)


def test_no_utilization_without_steps_or_flops(make_state: Any) -> None:
    run = Run(make_state, peak=1.0)
    assert "mfu" not in run.log(total_flos=100.0)
    run.step(1.0)
    assert "mfu" not in run.log(total_flos=100.0)


def test_peak_mem_is_the_same_list(make_state: Any) -> None:
    run = Run(make_state)
    logs = run.log(peak_mem_allocated=[1, 2])
    assert logs["peak_mem"] is logs["peak_mem_allocated"]
    assert run.log() == {}


def test_second_training_starts_anew(make_state: Any) -> None:
    run = Run(make_state, peak=1.0)
    run.log(tokens=1)
    run.step(1.0)
    run.metrics.on_train_begin(args=None, state=run.state, control=None)
    assert run.log(tokens=10, total_flos=5.0) == {"tokens": 10, "total_flos": 5.0}


def test_only_the_first_rank_adds_anything(make_state: Any) -> None:
    run = Run(make_state, peak=1.0, rank=1)
    run.step(1.0)
    run.log(tokens=10)
    run.step(1.0)
    assert run.log(tokens=10, total_flos=5.0, peak_mem_allocated=[1]).keys() == {
        "tokens",
        "total_flos",
        "peak_mem_allocated",
    }
