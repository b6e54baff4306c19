"""Reads NVIDIA GPU telemetry (energy, power, temperature, load and clock), and measures the energy of a run."""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Callable
from typing import Any

import torch

from onstep.distributed import World
from onstep.errors import warn_once

logger = logging.getLogger(__name__)


class GpuTelemetry:
    """Reads one GPU through NVML. Values that the driver does not provide are NaN.

    Args:
        nvml: the module `pynvml`, initialized.
        handle: the GPU's NVML handle.
    """

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle

    def joules(self) -> float:
        """Energy since the driver was loaded."""
        return self._read(lambda: self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) * 1e-3)

    def watts(self) -> float:
        """Current power."""
        return self._read(lambda: self._nvml.nvmlDeviceGetPowerUsage(self._handle) * 1e-3)

    def celsius(self) -> float:
        """Temperature of the chip."""
        return self._read(lambda: self._nvml.nvmlDeviceGetTemperature(self._handle, self._nvml.NVML_TEMPERATURE_GPU))

    def utilization(self) -> float:
        """Percent of the recent sampling period in which a kernel ran."""
        return self._read(lambda: self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu)

    def megahertz(self) -> float:
        """Clock of the streaming multiprocessors."""
        return self._read(lambda: self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM))

    def _read(self, read: Callable[[], float]) -> float:
        try:
            return float(read())
        except self._nvml.NVMLError:
            return math.nan


def open_gpu_telemetry(device: torch.device) -> GpuTelemetry | None:
    """Open the readings of a CUDA device; None, with one warning, without such a device or a driver to query."""
    if device.type != "cuda":
        warn_once(logger, "power and energy are only measured on NVIDIA GPUs; this run is on the CPU")
        return None
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        warn_once(logger, "GPU telemetry requires pynvml: pip install 'onstep[gpu]'; without it none is recorded")
        return None
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except nvml.NVMLError as error:
        warn_once(logger, f"NVIDIA's driver provides no telemetry for {device}: {error}")
        return None
    return GpuTelemetry(nvml, handle)


class EnergyMonitor:
    """Sums the joules of all ranks, except while paused, as during evaluations and saves.

    Args:
        world: the ranks.
        joules: this rank's monotonically increasing meter; None without one.
    """

    def __init__(self, world: World, joules: Callable[[], float] | None = None) -> None:
        self._world, self._joules = world, joules
        self.is_available = False
        self._started: float | None = None
        self._since_lap = 0.0
        self._total = 0.0

    def setup(self) -> bool:
        """Whether every rank can read its meter; otherwise nothing is measured. Collective."""
        if self._joules is None:
            telemetry = open_gpu_telemetry(self._world.device)
            self._joules = telemetry.joules if telemetry is not None else None
        can_read = self._joules is not None and not math.isnan(self._joules())
        self.is_available = self._world.agree([int(not can_read)]) == [0]
        return self.is_available

    def resume(self) -> None:
        """Start or continue counting."""
        if self._started is None:
            self._started = self._read()

    def restart(self) -> None:
        """Discard everything since the last lap, and start counting."""
        self._since_lap = 0.0
        self._started = self._read()

    def pause(self) -> None:
        """Stop counting until `resume`."""
        if self._started is not None:
            self._since_lap += self._read() - self._started
            self._started = None

    def lap(self) -> float:
        """Joules of all ranks since the last lap; counting continues. Collective."""
        was_running = self._started is not None
        self.pause()
        joules, self._since_lap = self._since_lap, 0.0
        if was_running:
            self.resume()
        of_all = sum(row[0] for row in self._world.gather_numbers([joules])) if self.is_available else 0.0
        self._total += of_all
        return of_all

    def get_total(self) -> float:
        """Joules of all ranks up to the last lap."""
        return self._total

    def _read(self) -> float:
        return self._joules() if self.is_available and self._joules is not None else 0.0
