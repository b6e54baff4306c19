"""What NVIDIA's driver tells of one GPU: energy, power, temperature, load and clock."""

from __future__ import annotations

import importlib
import logging
import math
from typing import Any

import torch

logger = logging.getLogger(__name__)

_warned: set[str] = set()


class GpuGauge:
    """Reads one GPU through NVML. What the driver does not tell is NaN.

    Args:
        nvml: the module `pynvml`, initialised.
        handle: the GPU in it.
    """

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle

    def joules(self) -> float:
        """Energy since the driver was loaded."""
        return self._read("nvmlDeviceGetTotalEnergyConsumption", scale=1e-3)

    def watts(self) -> float:
        """Power now."""
        return self._read("nvmlDeviceGetPowerUsage", scale=1e-3)

    def celsius(self) -> float:
        """Temperature of the chip."""
        return self._read("nvmlDeviceGetTemperature", self._nvml.NVML_TEMPERATURE_GPU)

    def utilization(self) -> float:
        """Percent of the last moments in which a kernel ran."""
        try:
            return float(self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu)
        except self._nvml.NVMLError:
            return math.nan

    def megahertz(self) -> float:
        """Clock of the multiprocessors."""
        return self._read("nvmlDeviceGetClockInfo", self._nvml.NVML_CLOCK_SM)

    def _read(self, function: str, *arguments: Any, scale: float = 1.0) -> float:
        try:
            return float(getattr(self._nvml, function)(self._handle, *arguments)) * scale
        except self._nvml.NVMLError:
            return math.nan


def open_gauge(device: torch.device) -> GpuGauge | None:
    """A gauge of a CUDA device; None, with one warning, where there is no such device or nobody to ask."""
    if device.type != "cuda":
        _warn_once("readings of power and energy are those of NVIDIA's GPUs; this run is on the CPU and has none")
        return None
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        _warn_once("readings of the GPU need pynvml: pip install 'onstep[gpu]'. Until then there are none")
        return None
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except nvml.NVMLError as error:
        _warn_once(f"NVIDIA's driver gives no readings of {device}: {error}")
        return None
    return GpuGauge(nvml, handle)


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        logger.warning("%s", text)
