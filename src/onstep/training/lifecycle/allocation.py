"""Ends a run with a checkpoint before the SLURM allocation ends that it trains in."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime

from onstep.analysis.logs.run_status import run_record
from onstep.errors import RunExistsError
from onstep.slurm.allocation import Allocation
from onstep.training.compute.step import Step
from onstep.training.feature import Feature, Interruption
from onstep.training.run import Run
from onstep.training.runs.allocation_limit import AllocationLimit

logger = logging.getLogger(__name__)

SAVE_SECONDS = "save_seconds"
"""Its key in run.json."""


class AllocationEnd(Feature[Run]):
    """Reads when the SLURM allocation ends, and measures how long saves last; rank 0 decides."""

    name = "allocation"
    when = "train.exit_margin_seconds"

    @classmethod
    def wanted(cls, host: Run) -> bool:
        """In a SLURM job."""
        return host.cfg.train.exit_margin_seconds is not None and Allocation.of_process() is not None

    def __init__(self, host: Run) -> None:
        super().__init__(host)
        self._limit: AllocationLimit | None = None
        self._save_began: float | None = None

    @contextmanager
    def session(self) -> Iterator[None]:
        run, allocation, margin = self.host, Allocation.of_process(), self.host.cfg.train.exit_margin_seconds
        ends_at = allocation.ends_at() if allocation is not None and run.world.is_main else None
        if allocation is None or margin is None or ends_at is None:
            if allocation is not None and run.world.is_main:
                logger.info("SLURM does not say when job %s ends; a signal has to ask the run to save", allocation.job)
            yield
            return
        self._limit = AllocationLimit(allocation, ends_at, margin, self._recorded_seconds())
        if run.run_dir is not None and run.run_dir.mirror is not None:
            mirror = run.run_dir.mirror
            self._limit.seconds_to_upload = lambda: mirror.seconds_to_upload
        _announce(self._limit)
        try:
            yield
        finally:
            run.exits.allocation = None
            self._record_seconds()

    def begin(self) -> None:
        """The first step, which may compile, counts until there are others."""
        if self._limit is not None:
            self._limit.start()

    def after_count(self, step: Step) -> None:
        """From the first step on: a run that left before it would come back forever."""
        self.host.exits.allocation = self._limit

    def wrap_save(self, save: Callable[[], object]) -> Callable[[], object]:
        def measured() -> None:
            self._save_began = time.monotonic()
            save()
            self._measure()

        return measured

    @contextmanager
    def pause(self, work: Interruption) -> Iterator[None]:
        """An asynchronous save lasts until its checkpoint is complete."""
        yield
        if work == "finalize" and self._save_began is not None:
            self._measure()
            self._save_began = None

    def _measure(self) -> None:
        if self._limit is not None and self._save_began is not None:
            self._limit.save_seconds = max(self._limit.save_seconds, time.monotonic() - self._save_began)

    def _recorded_seconds(self) -> float:
        """How long the saves of earlier processes of the run have lasted."""
        found = None if self.host.run_dir is None else run_record(self.host.run_dir.path).get(SAVE_SECONDS)
        return float(found) if isinstance(found, int | float) else 0.0

    def _record_seconds(self) -> None:
        """Leave it to the next process, whose first save may be the one at its end."""
        if self.host.run_dir is None or self._limit is None or self._limit.save_seconds == 0:
            return
        try:
            content = {**self.host.run_dir.read(), SAVE_SECONDS: round(self._limit.save_seconds, 3)}
            self.host.run_dir.write(content)
        except (OSError, RunExistsError) as error:
            logger.warning("run.json does not say how long a save lasts: %s", error)


def _announce(limit: AllocationLimit) -> None:
    job, end = limit.allocation.job, datetime.fromtimestamp(limit.ends_at)
    logger.info(
        "SLURM job %s ends at %s; the run saves and exits with code 75 about %.0f s earlier",
        job,
        f"{end:%Y-%m-%d %H:%M:%S}",
        limit.seconds_needed,
    )
    if limit.seconds_left <= limit.seconds_needed:
        logger.warning(
            "SLURM job %s ends in %.0f s, but the run needs %.0f s for a save with train.exit_margin_seconds=%g: it "
            "exits after one step; ask SLURM for more time, or lower the margin",
            job,
            limit.seconds_left,
            limit.seconds_needed,
            limit.margin_seconds,
        )
