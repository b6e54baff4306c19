"""Publishes a diagnosis: on standard error, in the run's directory and in run.json."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from onstep.errors import OnstepError
from onstep.training.run import Run
from onstep.training.watchdog.diagnosis import FailureDiagnosis

logger = logging.getLogger(__name__)


def publish(run: Run, decision: FailureDiagnosis, text: str) -> None:
    """Print a report, store it in the run's directory, and record the failure in run.json."""
    with suppress(OSError):
        os.write(2, text.encode())
    if run.run_dir is not None:
        name = f"first-culprit-{datetime.now():%Y-%m-%dT%H-%M-%S}.txt"
        with suppress(OSError):
            Path(run.run_dir.path, name).write_text(text, encoding="utf-8")
    record_failure(run, decision)


def record_failure(run: Run, decision: FailureDiagnosis) -> None:
    """Record in run.json that the run has failed, and where."""
    if run.run_dir is not None:
        with suppress(OSError, OnstepError):
            run.run_dir.finish("failed", run.train_state.step, decision.line)


def announcing_end(watch: Callable[[], None]) -> Callable[[], None]:
    """`watch` for a thread; an error that ends it is logged, since the run continues without a watchdog."""

    def announced() -> None:
        try:
            watch()
        except Exception:
            logger.exception("the watchdog has failed; the run continues, but a rank that hangs is no longer noticed")

    return announced
