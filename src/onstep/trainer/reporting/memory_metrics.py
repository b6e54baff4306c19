"""Measures the memory that a training, evaluation or prediction uses, under Hugging Face's names."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from onstep.errors import MissingExtraError

_INTERVAL = 0.005
"""Seconds between two samples of the process's memory."""


class MemoryMetrics:
    """Memory of the process (resident set) and of the GPU (torch's allocator), in bytes, over stages.

    A stage inside another one is not measured by itself. `<stage>_mem_cpu_alloc_delta` is what is in use at the end
    more than at the start, `_peaked_delta` how much more than at the end there was in between; likewise `_gpu_`. The
    first stage that is reported adds the constructor's, `init`.

    Args:
        enabled: False measures nothing, at no cost.

    Raises:
        MissingExtraError: if enabled without psutil.
    """

    def __init__(self, enabled: bool) -> None:
        self._stage: _Stage | None = None
        self._unreported: dict[str, Any] = {}
        self._process: Any = None
        if enabled:
            try:
                import psutil
            except ImportError as error:
                raise MissingExtraError(
                    "TrainingArguments.skip_memory_metrics=False requires psutil; install it: pip install "
                    "'onstep[diagnostics]', or leave skip_memory_metrics=True."
                ) from error
            self._process = psutil.Process()

    @property
    def enabled(self) -> bool:
        """Whether anything is measured."""
        return self._process is not None

    @contextmanager
    def measured(self, name: str) -> Iterator[dict[str, Any]]:
        """Measure a stage; the dictionary has the metrics at the end."""
        metrics: dict[str, Any] = {}
        if not self.enabled or self._stage is not None:
            yield metrics
            return
        self._stage = stage = _Stage(name, self._process)
        try:
            yield metrics
        finally:
            self._stage = None
            metrics |= stage.metrics()
        if name == "init":
            self._unreported = {**metrics, **stage.before()}
            return
        metrics |= self._unreported
        self._unreported = {}

    def current(self) -> dict[str, Any]:
        """The metrics of the current stage so far; {} outside of one."""
        if self._stage is None:
            return {}
        metrics, self._unreported = {**self._unreported, **self._stage.metrics()}, {}
        return metrics


@dataclass(eq=False)
class _Stage:
    """One stage, from its construction on; a thread watches the memory of the process."""

    name: str
    process: Any
    _ended: threading.Event = field(default_factory=threading.Event)
    _final: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        gc.collect()
        self._has_gpu = torch.cuda.is_available()
        if self._has_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        self._gpu_at_start = torch.cuda.memory_allocated() if self._has_gpu else 0
        self._at_start = self._peak = self._used()
        self._watcher = threading.Thread(target=self._watch, name="onstep-memory", daemon=True)
        self._watcher.start()

    def metrics(self) -> dict[str, Any]:
        """The metrics at the first call, which ends the measurement."""
        if not self._final:
            self._ended.set()
            self._watcher.join()
            gc.collect()
            now = self._used()
            self._add("cpu", now - self._at_start, max(0, self._peak - now))
            if self._has_gpu:
                now = torch.cuda.memory_allocated()
                self._add("gpu", now - self._gpu_at_start, max(0, torch.cuda.max_memory_allocated() - now))
        return self._final

    def before(self) -> dict[str, Any]:
        """What was in use at its start."""
        gpu = {f"before_{self.name}_mem_gpu": self._gpu_at_start} if self._has_gpu else {}
        return {f"before_{self.name}_mem_cpu": self._at_start, **gpu}

    def _add(self, kind: str, allocated: int, peaked: int) -> None:
        prefix = f"{self.name}_mem_{kind}"
        self._final |= {f"{prefix}_alloc_delta": allocated, f"{prefix}_peaked_delta": peaked}

    def _used(self) -> int:
        return int(self.process.memory_info().rss)

    def _watch(self) -> None:
        while not self._ended.wait(_INTERVAL):
            self._peak = max(self._peak, self._used())
