"""Healthy curves have no spikes; a step ten times as high is one, and does not hide the next."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from typing import Any

import pytest

from onstep.config import AnomalyConfig
from onstep.training.anomalies.spikes import SpikeDetector


def detector(**options: Any) -> SpikeDetector:
    return SpikeDetector(AnomalyConfig(**options))


def healthy_curve(seed: int, steps: int = 1000) -> list[dict[str, float]]:
    """Loss falling as a power law with normal noise; gradient norms log-normal around a falling level.

    The noise is 2 to 6 % of the loss and 10 to 30 % of the norm.
    """
    generator = random.Random(seed)
    start, floor, power = generator.uniform(5, 11), generator.uniform(1.5, 3), generator.uniform(0.3, 0.7)
    loss_noise, norm_noise = generator.uniform(0.02, 0.06), generator.uniform(0.1, 0.3)
    curve = []
    for step in range(1, steps + 1):
        level = floor + (start - floor) * step**-power
        norm = (0.3 + 3 * step**-0.5) * math.exp(generator.gauss(0, norm_noise))
        curve.append({"loss": level * (1 + generator.gauss(0, loss_noise)), "grad_norm": norm})
    return curve


def spikes_in(curve: list[dict[str, float]], watch: SpikeDetector) -> list[int]:
    found = []
    for step, values in enumerate(curve, start=1):
        if watch.find(values) is None:
            watch.accept(step, values)
        else:
            found.append(step)
    return found


@pytest.mark.parametrize("seed", range(20))
def test_a_noisy_healthy_curve_has_no_spike(seed: int) -> None:
    assert spikes_in(healthy_curve(seed), detector()) == []


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("metric", ["loss", "grad_norm"])
def test_ten_times_as_high_is_a_spike(seed: int, metric: str) -> None:
    curve = healthy_curve(seed)
    spiked = [300, 301, 302, 700]
    for step in spiked:
        curve[step - 1][metric] = 10 * statistics.median(values[metric] for values in curve[step - 101 : step - 1])
    assert spikes_in(curve, detector()) == spiked


def test_a_spike_says_what_it_was_measured_against() -> None:
    watch = detector(spike_warmup=3)
    for step, loss in enumerate([2.0, 2.2, 1.8, 2.0]):
        watch.accept(step, {"loss": loss})
    spike = watch.find({"loss": 9.0})
    assert spike is not None
    assert (spike.metric, spike.value, spike.median) == ("loss", 9.0, 2.0)
    assert spike.limit == pytest.approx(2.0 + 10 * 1.4826 * 0.1)
    assert str(spike) == "loss 9 above 3.4826 (median of recent steps 2)"


def test_constant_values_do_not_make_noise_a_spike() -> None:
    watch = detector(spike_warmup=2)
    for step in range(50):
        watch.accept(step, {"loss": 2.0, "grad_norm": 0.0})
    assert watch.find({"loss": 2.0 + 1e-6, "grad_norm": 0.0}) is None
    assert watch.find({"loss": 2.19, "grad_norm": 0.0}) is None
    assert watch.find({"loss": 2.21, "grad_norm": 0.0}) is not None


def test_falling_values_are_no_spikes_also_below_zero() -> None:
    watch = detector(spike_warmup=2)
    for step in range(50):
        watch.accept(step, {"loss": -2.0})
    assert watch.find({"loss": -500.0}) is None
    assert watch.find({"loss": 5.0}) is not None


def test_nothing_is_a_spike_before_the_warm_up() -> None:
    watch = detector(spike_warmup=5)
    for step in range(4):
        watch.accept(step, {"loss": 1.0})
    assert watch.find({"loss": 1e9}) is None
    watch.accept(4, {"loss": 1.0})
    assert watch.find({"loss": 1e9}) is not None


def test_only_the_configured_metrics_are_watched_and_infinity_is_above_every_limit() -> None:
    watch = detector(spike_metrics=["grad_norm"], spike_warmup=1)
    watch.accept(1, {"loss": 1.0, "grad_norm": 1.0})
    assert watch.find({"loss": 1e9, "grad_norm": 1.0}) is None
    assert watch.find({"loss": 1.0, "grad_norm": math.inf}) is not None
    assert watch.find({"loss": 1.0, "grad_norm": math.nan}) is None
    assert watch.find({"loss": 1.0}) is None


def test_values_that_are_not_finite_never_become_the_measure() -> None:
    watch = detector(spike_warmup=1)
    watch.accept(1, {"loss": 1.0})
    for step in range(2, 200):
        watch.accept(step, {"loss": math.inf if step % 2 else math.nan})
    assert watch.find({"loss": 1.5}) is not None


def limit_after(watch: SpikeDetector) -> float:
    spike = watch.find({"loss": 1e30})
    assert spike is not None
    return spike.limit


@pytest.mark.parametrize("how", ["state", "rollback"])
def test_the_measure_continues_after_a_resume_and_goes_back_with_a_rollback(how: str) -> None:
    curve = healthy_curve(1, steps=60)
    make: Callable[[], SpikeDetector] = lambda: detector(spike_metrics=["loss"], spike_window=50)  # noqa: E731
    short, long = make(), make()
    assert spikes_in(curve[:40], short) == []
    assert spikes_in(curve[:45], long) == []
    assert limit_after(short) != limit_after(long)
    if how == "rollback":
        long.forget_after(40)
        assert limit_after(long) == limit_after(short)
    else:
        other = make()
        other.load_state_dict(short.state_dict())
        assert limit_after(other) == limit_after(short)
        assert spikes_in(curve[40:], other) == spikes_in(curve[40:], short)
        assert limit_after(other) == limit_after(short)
