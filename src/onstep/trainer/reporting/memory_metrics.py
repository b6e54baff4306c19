"""Measures the memory that a training, evaluation or prediction uses, with the tracker of `transformers`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from onstep.errors import MissingExtraError
from onstep.metrics.memory_peaks import ALLOCATED, MemoryPeaks
from onstep.record.kinds import Metrics

_INTERVAL = 0.005
"""Seconds between two samples of the process's memory; the tracker's own thread never sleeps."""


class MemoryMetrics:
    """Memory of the process (resident set) and of the GPU (torch's allocator), in bytes, over stages.

    A stage inside another one is not measured by itself. `<stage>_mem_cpu_alloc_delta` is what is in use at the end
    more than at the start, `_peaked_delta` how much more than at the end there was in between; likewise `_gpu_`. The
    first stage that is reported adds the constructor's, `init`.

    Args:
        enabled: False measures nothing, at no cost.

    Raises:
        MissingExtraError: if enabled without psutil or transformers.
    """

    def __init__(self, enabled: bool) -> None:
        self._stage: str | None = None
        self._peaks: MemoryPeaks | None = None
        self._tracker: Any = _tracker() if enabled else None

    @property
    def enabled(self) -> bool:
        """Whether anything is measured."""
        return self._tracker is not None

    @contextmanager
    def measured(self, name: str, peaks: MemoryPeaks | None = None) -> Iterator[Metrics]:
        """Measure a stage; the dictionary has the metrics at the end.

        Args:
            name: the name of the stage.
            peaks: those of a run that resets torch's counter during the stage.
        """
        metrics: Metrics = {}
        if not self.enabled or self._stage is not None:
            yield metrics
            return
        self._stage, self._peaks = name, peaks
        self._tracker.derive_stage = lambda: name
        self._tracker.start()
        try:
            yield metrics
        finally:
            self._stop()
            if name != "init":
                self._tracker.update_metrics(name, metrics)
            self._stage = None

    def current(self) -> Metrics:
        """The metrics of the current stage, whose measurement the first call ends; {} outside of one."""
        metrics: Metrics = {}
        if self._stage is not None:
            self._stop()
            self._tracker.update_metrics(self._stage, metrics)
        return metrics

    def _stop(self) -> None:
        if self._tracker.cur_stage is not None:
            self._tracker.stop(self._stage)
            on_gpu: dict[str, int] | None = getattr(self._tracker, "gpu", {}).get(self._stage)
            if on_gpu is not None and self._peaks is not None:  # the tracker has seen the last interval alone
                peak = self._peaks.of_run(ALLOCATED, on_gpu["end"] + on_gpu["peaked"])
                on_gpu["peaked"] = peak - on_gpu["end"]


def _tracker() -> Any:
    try:
        import psutil  # noqa: F401 - without it the tracker measures nothing
        from transformers import trainer_utils
    except ImportError as error:
        raise MissingExtraError(
            f"TrainingArguments.skip_memory_metrics=False requires psutil and transformers ({error}); install them: "
            f"pip install 'onstep[diagnostics,hf]', or leave skip_memory_metrics=True."
        ) from error
    kind: Any = trainer_utils.TrainerMemoryTracker
    tracker = kind()
    tracker.cpu_mem_used_peak = -1

    def watch() -> None:
        tracker.cpu_mem_used_peak = -1
        while tracker.peak_monitoring:
            tracker.cpu_mem_used_peak = max(tracker.cpu_mem_used(), tracker.cpu_mem_used_peak)
            time.sleep(_INTERVAL)

    tracker.peak_monitor_func = watch
    return tracker
