"""Derives tokens per second, model FLOPs utilization and peak memory from what a logged step reports."""

from __future__ import annotations

import time
from typing import Any

from onstep.events import TrainerCallback


class DefaultMetrics(TrainerCallback):
    """Adds derived performance metrics to `logs`, before anybody reads them at `on_log`.

    - `tok_per_sec`: tokens of all ranks per second of wall clock since the last logged step (evaluation, saving and
      logging included), an integer; from the second logged step on.
    - `mfu`: model FLOPs utilization, a fraction: FLOPs since the last logged step per second spent inside steps, over
      `peak_hardware_flops`.
    - `peak_mem`: `peak_mem_allocated` under the name that the console shows, a list of bytes, one entry a rank.

    Args:
        peak_hardware_flops: Peak FLOP/s of all GPUs of the job together (dense bfloat16, float32 accumulation: 312e12
            for one A100, 989e12 for one H100 SXM); None leaves `mfu` out. Set it before the callback is
            registered.
    """

    ranks = "main"

    def __init__(self, peak_hardware_flops: float | None = None) -> None:
        self.peak_hardware_flops = peak_hardware_flops
        self.clock = time.monotonic
        """Seconds; replace it to measure with another clock."""
        self._last_log_time: float | None = None
        self._step_start: float | None = None
        self._step_seconds = 0.0
        self._last_total_flos = 0.0

    def skips_event(self, name: str) -> bool:
        """Steps are timed only where `mfu` is wanted."""
        return not self.peak_hardware_flops and name in ("on_step_begin", "on_step_end")

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start anew, from the FLOPs of a resumed run."""
        self._last_log_time = None
        self._step_start = None
        self._step_seconds = 0.0
        self._last_total_flos = state.total_flos or 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Remember when the step began."""
        self._step_start = self.clock()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add the step's duration."""
        if self._step_start is not None:
            self._step_seconds += self.clock() - self._step_start
            self._step_start = None

    def on_log_step(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        """Add the metrics, and start the next interval."""
        if not state.is_world_process_zero:
            return
        now = self.clock()
        total_flos = logs.get("total_flos", state.total_flos or 0.0)
        tokens_per_second = self._tokens_per_second(logs, now)
        utilization = self._utilization(total_flos)
        if tokens_per_second is not None:
            logs["tok_per_sec"] = tokens_per_second
        if utilization is not None:
            logs["mfu"] = utilization
        if "peak_mem_allocated" in logs:
            logs["peak_mem"] = logs["peak_mem_allocated"]
        self._last_log_time = now
        self._step_seconds = 0.0
        self._last_total_flos = total_flos

    def _tokens_per_second(self, logs: dict[str, Any], now: float) -> int | None:
        if "tokens" not in logs or self._last_log_time is None or now <= self._last_log_time:
            return None
        return round(float(logs["tokens"]) / (now - self._last_log_time))

    def _utilization(self, total_flos: float) -> float | None:
        flos = total_flos - self._last_total_flos
        if not self.peak_hardware_flops or self._step_seconds <= 0 or flos <= 0:
            return None
        return float(flos / self._step_seconds / self.peak_hardware_flops)
