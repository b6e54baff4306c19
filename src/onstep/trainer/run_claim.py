"""The folder of a Trainer's run: who may train into it."""

from __future__ import annotations

import logging
from pathlib import Path

from onstep.config import ConfigContainer
from onstep.distributed import World
from onstep.errors import RunExistsError
from onstep.trainer.base_trainer import BaseTrainer
from onstep.training.opening import already_finished, claim_for_all
from onstep.training.run_folder import FINISHED, Claim, RunFolder
from onstep.training.run_lock import RunLock

logger = logging.getLogger(__name__)


def claim_folder(trainer: BaseTrainer, config: ConfigContainer, world: World) -> tuple[Claim | None, RunLock | None]:
    """Take the run's folder: a new one, one to continue, or again the one that this Trainer completed. Collective.

    A Trainer that has completed its run and trains again starts a new one in the same folder; the checkpoints of the
    run before are kept aside. A run that another process completed is taken as it is: its weights are loaded, and
    there is nothing left to train.

    Raises:
        RunExistsError: when the folder holds another run, or a completed one without checkpoints.
        ConfigError: when it cannot be written.
    """
    if config.run.name is None:
        return None, None
    asked = Path(config.run.output_dir).absolute() / config.run.name
    folder = trainer.owned_folders.get(asked)
    if folder is not None and world.is_main and folder.read().get("status") in FINISHED:
        folder.begin_again()
    world.barrier()
    claim, lock = _claim(config, world, asked, folder)
    trainer.owned_folders[asked] = claim.folder
    return claim, lock


def _claim(config: ConfigContainer, world: World, asked: Path, owned: RunFolder | None) -> tuple[Claim, RunLock | None]:
    if owned is not None:
        config.run.fresh, config.run.name = False, owned.path.name
    beside = f"config_overrides={{'run.fresh': True}} for {asked.name}-2 beside it"
    ways_out = f"In TrainingArguments: another output_dir, or {beside}."
    try:
        claim, lock = claim_for_all(config, world)
    except RunExistsError as error:
        raise RunExistsError(f"{error} {ways_out}") from None
    assert claim is not None
    if not claim.is_finished:
        return claim, lock
    if not _has_checkpoints(claim, world):
        raise RunExistsError(
            f"{claim.folder.path} holds a completed run of the same arguments, and no checkpoint to take its weights "
            f"from. Nothing was touched. {ways_out}"
        )
    if world.is_main:
        logger.warning("%s", already_finished(claim.folder))
        lock = RunLock(claim.folder.lock)
    return claim, lock


def _has_checkpoints(claim: Claim, world: World) -> bool:
    has_some: bool = world.share(any(claim.folder.checkpoints.glob("checkpoint-*")))
    return has_some
