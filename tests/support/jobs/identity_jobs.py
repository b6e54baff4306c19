"""What ranks run that differ in their files: `job_*(settings)`."""

from __future__ import annotations

import os
from typing import Any

from onstep import pretrain
from onstep.config import apply_overrides
from onstep.errors import DataError
from onstep.recipes import tiny_gpt_pretrain_config


def job_own_corpus(settings: dict[str, Any]) -> str:
    """Train on the files that each rank has of its own; what the refusal says."""
    config = tiny_gpt_pretrain_config()
    apply_overrides(config, [*settings["words"], f"dataset.paths=[of-{os.environ['RANK']}]"])
    try:
        pretrain(config)
    except DataError as error:
        return str(error)
    return "trained"
