"""Runs on data behind URLs, and what downloads it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from onstep import JsonLogger, pretrain
from onstep.config import DatasetConfig
from onstep.data.urls.local_copy import local_copy
from tests.support.jobs.resume_jobs import small_config


def job_copy(settings: dict[str, Any]) -> dict[str, str]:
    """Download what a URL names; the text of each file."""
    os.environ.update(settings["environment"])
    Path("pid").write_text(str(os.getpid()))
    copy = local_copy(DatasetConfig(kind="text", paths=settings["paths"], cache_dir=settings["cache"]))
    assert copy.view is not None
    return {copy.url_of(path): path.read_text() for path in copy.view.rglob("*") if path.is_file()}


def job_train(settings: dict[str, Any]) -> None:
    """Train on `paths`, to `until` if that is given."""
    os.environ.update(settings["environment"])
    config = small_config(settings)
    config.dataset.paths = settings["paths"]
    config.checkpoint.save_interval, config.train.exit_interval = 4, settings.get("until")
    pretrain(config, callbacks=[JsonLogger()])
