"""`onstep` in a forked process that takes no step before somebody has seen the last one: `job_onstep(settings)`."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from onstep.training.verification.trajectory_hash import HashChain
from tests.support.jobs import cli_jobs
from tests.support.waiting import until


def job_onstep(settings: dict[str, Any]) -> None:
    """Do what `onstep <words>` does; after each step wait until the file `seen` has its number."""
    extend, seen = HashChain.extend, Path(settings["seen"])

    @functools.wraps(extend)
    def extended(self: HashChain, step: int, *rest: Any) -> Any:
        record = extend(self, step, *rest)
        until(lambda: seen.exists() and int(seen.read_text() or 0) >= step)
        return record

    HashChain.extend = extended  # type: ignore[method-assign]
    cli_jobs.job_onstep(settings)
