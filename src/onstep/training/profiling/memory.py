"""Features that look after memory: the allocator's history, releasing unused memory, and garbage collection."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from onstep.errors import warn_once
from onstep.metrics.memory_reports import start_memory_history_recording
from onstep.training.compute.losses import MicroLoss, Scalar
from onstep.training.compute.step import Step
from onstep.training.feature import Feature, Interruption, is_due
from onstep.training.profiling.instruments import P, T
from onstep.training.run import Run
from onstep.training.stages.job import Job

logger = logging.getLogger(__name__)


class MemoryHistory(Feature[Run]):
    """Records the allocator's history, from before the model is built."""

    name = "memory_history"
    when = "profiling.record_memory_history"

    def session(self) -> AbstractContextManager[object]:
        if not torch.cuda.is_available():
            warn_once(logger, "profiling.record_memory_history does nothing without a CUDA GPU; set it to false")
        start_memory_history_recording(self.host.cfg.profiling)
        return nullcontext()


class MemoryRelease(Feature[Run]):
    """Releases the device's unused memory around updates, and in evaluations."""

    name = "memory_release"
    when = (
        "train.empty_unused_memory_level of 1 or more; 2 also releases after the update; or "
        "train.empty_unused_memory_interval"
    )

    @classmethod
    def wanted(cls, host: Run) -> bool:
        train = host.cfg.train
        return train.empty_unused_memory_level >= 1 or train.empty_unused_memory_interval is not None

    def before_backward(self, step: Step, micro: MicroLoss, start: Scalar | None) -> None:
        """Release before the backward passes of every so many steps, the first one included."""
        if is_due(step.number - 1, self.host.cfg.train.empty_unused_memory_interval):
            empty_unused_memory()

    def before_update(self, step: Step) -> None:
        if self.host.cfg.train.empty_unused_memory_level >= 1:
            empty_unused_memory()

    def after_update(self, step: Step) -> None:
        if self.host.cfg.train.empty_unused_memory_level >= 2:
            empty_unused_memory()

    def wrap_score(self, score: Callable[P, T]) -> Callable[P, T]:
        """Release after a batch of an evaluation."""
        if self.host.cfg.train.empty_unused_memory_level < 1:
            return score

        def released(*args: P.args, **kwargs: P.kwargs) -> T:
            result = score(*args, **kwargs)
            empty_unused_memory()
            return result

        return released


def empty_unused_memory() -> None:
    """Release the device's unused memory to others; the CPU has none of this kind."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class ManualGarbageCollection(Feature[Job]):
    """Collects garbage at the same steps on all ranks, and at no other time."""

    name = "manual_gc"
    when = "train.manual_gc, every train.manual_gc_interval"

    @classmethod
    def wanted(cls, host: Job) -> bool:
        return host.run.cfg.train.manual_gc

    @contextmanager
    def session(self) -> Iterator[None]:
        """Turn automatic collection off, and on again at the end."""
        was_enabled = gc.isenabled()
        gc.disable()
        gc.collect()
        try:
            yield
        finally:
            if was_enabled:
                gc.enable()

    def after_iteration(self, step: Step) -> None:
        if is_due(step.number, self.host.run.cfg.train.manual_gc_interval):
            gc.collect()

    @contextmanager
    def pause(self, work: Interruption) -> Iterator[None]:
        """Collect before an evaluation, and the youngest generation after it, with `train.manual_gc_eval`."""
        collects = work == "evaluate" and self.host.run.cfg.train.manual_gc_eval
        if collects:
            gc.collect()
        yield
        if collects:
            gc.collect(generation=0)
