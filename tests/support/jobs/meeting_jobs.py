"""Ranks that differ, or were restarted another number of times: `job_*(settings)`."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from onstep import Trainer, pretrain
from onstep.config import DistributedInitConfig
from onstep.distributed import open_world
from onstep.errors import ConfigError
from onstep.training.runs import shared_place
from tests.support.jobs.rank_jobs import RANK, config
from tests.support.small_models import Regression, arguments, regression_rows


def job_differ(settings: dict[str, Any]) -> dict[str, Any]:
    """What each door says where rank 1 is to save at other steps, and whether there was a process group by then."""
    said = {}
    try:
        chosen = config(settings)
        chosen.checkpoint.save_interval, chosen.run.name, chosen.run.output_dir = 2 + RANK, "a", settings["runs"]
        pretrain(chosen)
    except ConfigError as refusal:
        said["pretrain"] = str(refusal)
    said["group"] = str(dist.is_initialized())
    try:
        args = arguments(Path(settings["runs"]), max_steps=4, use_cpu=True, save_strategy="steps", save_steps=2 + RANK)
        Trainer(Regression(), args, train_dataset=regression_rows(48)).train()
    except ConfigError as refusal:
        said["trainer"] = str(refusal)
    return said


def job_restarted(settings: dict[str, Any]) -> float:
    """The sum over ranks whose launchers have restarted them a different number of times."""
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(RANK)
    with closing(open_world(DistributedInitConfig(device="cpu"))) as world:
        return world.sum(torch.ones(1)).item()


def job_elsewhere(settings: dict[str, Any]) -> str:
    """What a run says whose rank 1 works in another directory, to which its relative path leads."""
    chosen = config(settings)
    chosen.run.name = "a"
    place = Path(f"of-{RANK}")
    place.mkdir()
    os.chdir(place)
    try:
        with mock.patch.object(shared_place, "SEEN_SECONDS", 0.1):
            pretrain(chosen)
    except ConfigError as refusal:
        return str(refusal)
    finally:
        os.chdir("..")
    return ""
