"""Publishes a diagnosis: on standard error, in the run's directory and in run.json."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from onstep.errors import ConfigError, OnstepError, RankFailedError
from onstep.launch.failures import note_first_failure
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


def note_for_launcher(decision: FailureDiagnosis, *, is_cause: bool) -> None:
    """Let the launcher of this rank name the rank that has failed first, and why.

    Args:
        decision: what all ranks act on.
        is_cause: whether it names this rank.
    """
    note_first_failure(
        decision.rank, decision.refusal or decision.line, is_own=is_cause, is_refusal=bool(decision.refusal)
    )


def say_end(decision: FailureDiagnosis) -> None:
    """Print the error of a rank that ends because another has failed, where it cannot be raised."""
    kind, text = (ConfigError, decision.refusal) if decision.refusal else (RankFailedError, decision.line)
    with suppress(OSError):
        os.write(2, f"{kind.__module__}.{kind.__qualname__}: {text}\n".encode())


def announcing_end(watch: Callable[[], None]) -> Callable[[], None]:
    """`watch` for a thread; an error that ends it is logged, since the run continues without a watchdog."""

    def announced() -> None:
        try:
            watch()
        except Exception:
            logger.exception("the watchdog has failed; the run continues, but a rank that hangs is no longer noticed")

    return announced
