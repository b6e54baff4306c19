"""Trainers whose `output_dir` is in an object store."""

from __future__ import annotations

import os
from typing import Any

from tests.support.jobs import trainer_jobs


def job_train(settings: dict[str, Any]) -> None:
    """As that of `trainer_jobs`, with an `environment`."""
    os.environ.update(settings["environment"])
    trainer_jobs.job_train(settings)
