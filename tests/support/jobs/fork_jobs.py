"""Processes that verify a checkpoint and then fork others that verify it too: `job_*(settings)`."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, Dataset

from onstep import Trainer, TrainingArguments, pretrain
from onstep.checkpoint import read_tensors, resolve
from onstep.cli.main import main
from tests.support.small_configs import small_pretrain_config
from tests.support.small_models import Regression, regression_rows

LIMIT_SECONDS = 100


class Verifying(Dataset[int]):
    """A dataset whose samples are the steps of a checkpoint that each worker verifies."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        signal.alarm(LIMIT_SECONDS)
        return resolve(self.path).step


def ended(work: Callable[[], Any]) -> int:
    """What a forked child ends with: 0, a positive exit code, or minus the signal that ended it."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        signal.alarm(LIMIT_SECONDS)
        work()
        code = 0
    finally:
        os._exit(code)


def job_verify(settings: dict[str, Any]) -> list[int]:
    """The command line here and in a child; then a child and a data worker with the library itself."""
    path = settings["path"]
    here = main(["checkpoint", "verify", path])
    there = ended(lambda: os._exit(main(["checkpoint", "verify", path])))
    [step] = DataLoader(Verifying(path), num_workers=1, batch_size=None, timeout=2 * LIMIT_SECONDS)
    return [here, there, ended(lambda: resolve(path)), int(step)]


def job_read(settings: dict[str, Any]) -> list[int]:
    """Read tensors with several threads of torch allowed, here and in a child."""
    import torch

    torch.set_num_threads(2)
    read_tensors(settings["path"])
    return [ended(lambda: read_tensors(settings["path"]))]


def job_resume(settings: dict[str, Any]) -> list[int]:
    """Save, resume here, and resume in a child, through both doors."""

    def by_pretrain(steps: int) -> None:
        config = small_pretrain_config(settings["corpus"], settings["cache"])
        config.run.name, config.run.output_dir = "run", "runs"
        config.train.train_iters, config.train.global_batch_size, config.train.micro_batch_size = steps, 4, 4
        config.checkpoint.save_interval, config.checkpoint.on_config_change = 1, "apply"
        config.scheduler.lr_warmup_iters, config.validation.eval_iters = 0, 0
        pretrain(config)

    def by_trainer(steps: int) -> None:
        values: dict[str, Any] = {"max_steps": steps, "save_strategy": "steps", "save_steps": 1, "use_cpu": True}
        values["config_overrides"] = {"checkpoint.on_config_change": "apply"}
        arguments = TrainingArguments(output_dir="trained", report_to=[], **values)
        trainer = Trainer(Regression(), arguments, train_dataset=regression_rows(26), default_callbacks=False)
        trainer.train(resume_from_checkpoint=Path("trained").exists())

    codes = []
    for door in (by_pretrain, by_trainer):
        door(1)
        door(2)
        codes.append(ended(lambda door=door: door(3)))  # type: ignore[misc]
    return codes
