"""What the ranks of the tests of converted configurations run: `job_*(settings)`."""

from __future__ import annotations

import os
from typing import Any

from onstep import pretrain
from onstep.config import apply_overrides, merge
from onstep.recipes import tiny_gpt_pretrain_config
from tests.support.jobs.sharding_jobs import Watch


def job_losses(settings: dict[str, Any]) -> list[list[float]]:
    """The losses of runs of `tiny_gpt` with the values of a file each, on a small text."""
    found = []
    for number, values in enumerate(settings["files"]):
        config = tiny_gpt_pretrain_config()
        merge(config, values)
        apply_overrides(config, settings["keys"])
        config.dataset.paths, config.dataset.cache_dir = [settings["text"]], settings["cache"]
        config.run.output_dir, config.run.name = "runs", f"on {os.environ.get('WORLD_SIZE', '1')}, {number}"
        watch = Watch()
        pretrain(config, callbacks=[watch])
        found.append(watch.losses)
    return found
