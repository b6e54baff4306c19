"""Joules of the GPUs, without evaluations and saves, and what is said where nobody can tell them."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from onstep import errors
from onstep.distributed import World
from onstep.training import EnergyMonitor
from onstep.training.reporting.gpu_telemetry import GpuTelemetry, open_gpu_telemetry
from tests.support.small_runs import eval_loader, run, small_state


class Meter:
    """A meter of energy that is moved by hand."""

    joules = 1000.0

    def __call__(self) -> float:
        return self.joules


class OneOfTwo(World):
    """A rank beside one that took twice as much."""

    def __init__(self) -> None:
        super().__init__(size=2)

    def gather_numbers(self, numbers: list[float]) -> list[list[float]]:
        return [numbers, [2 * one for one in numbers]]

    def agree(self, votes: list[int]) -> list[int]:
        return votes


def test_laps_add_up_what_all_ranks_took_while_it_was_not_paused() -> None:
    accumulator = Meter()
    monitor = EnergyMonitor(OneOfTwo(), accumulator)
    assert monitor.setup()
    accumulator.joules += 7  # before it is resumed
    monitor.resume()
    accumulator.joules += 10
    monitor.pause()
    accumulator.joules += 100  # an evaluation
    monitor.resume()
    monitor.resume()
    accumulator.joules += 5
    assert monitor.lap() == 45.0
    accumulator.joules += 1
    assert monitor.lap() == 3.0
    assert monitor.get_total() == 48.0


def test_a_restart_forgets_what_came_before_it() -> None:
    accumulator = Meter()
    monitor = EnergyMonitor(World(), accumulator)
    monitor.setup()
    monitor.resume()
    accumulator.joules += 50
    monitor.restart()
    accumulator.joules += 2
    assert monitor.lap() == 2.0


def test_one_rank_without_a_meter_is_none_for_all() -> None:
    class Other(OneOfTwo):
        def agree(self, votes: list[int]) -> list[int]:
            return [1]

    assert not EnergyMonitor(Other(), Meter()).setup()
    assert not EnergyMonitor(World(), lambda: math.nan).setup()


def test_a_run_on_the_cpu_says_once_that_it_has_none_and_goes_on(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors, "_warned_of", set())
    for _ in range(2):
        state = small_state(train_iters=2)
        state.cfg.logger.log_energy, state.cfg.logger.log_interval, state.cfg.logger.console = (
            True,
            1,
            "bridge",
        )
        run(state)
    assert caplog.text.count("this run is on the CPU") == 1
    out = capsys.readouterr().out
    assert out.count(" consumed samples: ") == 4
    assert "energy" not in out


def test_evaluations_take_no_energy_of_the_training(capsys: pytest.CaptureFixture[str]) -> None:
    accumulator = Meter()
    state = small_state(train_iters=4)
    state.cfg.logger.log_energy, state.cfg.logger.log_interval, state.cfg.logger.console = True, 2, "bridge"
    state.cfg.validation.eval_interval = 1
    state.energy_monitor = EnergyMonitor(state.world, accumulator)

    def step(data_iterator: Any, model: Any) -> Any:
        from tests.support.small_runs import sum_step

        accumulator.joules += 3.0 if model.training else 1e6
        return sum_step(data_iterator, model)

    run(state, step=step, valid=eval_loader())
    out = capsys.readouterr().out
    assert out.count(" energy per GPU (J/iter/GPU): 6.0 |") == 2
    assert "Total training energy (GPU): 2.4e-05 MJ" in out


class Nvml:
    """The names of pynvml that are used."""

    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM = 0, 1

    class NVMLError(Exception):
        pass

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any) -> int:
        return 5000  # mJ

    def nvmlDeviceGetPowerUsage(self, handle: Any) -> int:
        return 410_000  # mW

    def nvmlDeviceGetTemperature(self, handle: Any, sensor: int) -> int:
        assert sensor == self.NVML_TEMPERATURE_GPU
        return 61

    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> Any:
        return SimpleNamespace(gpu=97)

    def nvmlDeviceGetClockInfo(self, handle: Any, clock: int) -> int:
        assert clock == self.NVML_CLOCK_SM
        raise self.NVMLError("not supported")


def test_readings_are_in_plain_units_and_nan_where_the_driver_does_not_tell() -> None:
    telemetry = GpuTelemetry(Nvml(), object())
    assert (telemetry.joules(), telemetry.watts(), telemetry.celsius(), telemetry.utilization()) == (
        5.0,
        410.0,
        61.0,
        97.0,
    )
    assert math.isnan(telemetry.megahertz())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_real_gpu_has_a_meter() -> None:
    pytest.importorskip("pynvml")
    telemetry = open_gpu_telemetry(torch.device("cuda", 0))
    assert telemetry is not None
    assert telemetry.joules() > 0
    assert 0 < telemetry.watts() < 2000
    assert telemetry.megahertz() > 0
