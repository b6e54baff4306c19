"""Claims the directory of a Trainer's run."""

from __future__ import annotations

import logging
from pathlib import Path

from onstep.config import ConfigContainer
from onstep.distributed import World
from onstep.errors import RunExistsError
from onstep.trainer.base_trainer import BaseTrainer
from onstep.training.opening import already_finished, claim_for_all
from onstep.training.runs.run_dir import FINISHED, Claim, RunDir, RunLock

logger = logging.getLogger(__name__)


def acquire_dir(trainer: BaseTrainer, config: ConfigContainer, world: World) -> tuple[Claim | None, RunLock | None]:
    """Claim the run's directory: a new one, one to continue, or again the one that this Trainer completed. Collective.

    A Trainer that has completed its run and trains again starts a new run in the same directory; the checkpoints of the
    previous run are set aside. A run that another process completed is used as is: its weights are loaded, and nothing
    is left to train.

    Raises:
        RunExistsError: if the directory holds another run, or a completed one without checkpoints.
        ConfigError: if it cannot be written.
    """
    if config.run.name is None:
        return None, None
    asked = Path(config.run.output_dir).absolute() / config.run.name
    directory = trainer.owned_dirs.get(asked)
    if directory is not None and world.is_main and directory.read().get("status") in FINISHED:
        directory.begin_again()
    world.barrier()
    claim, lock = _claim(config, world, asked, directory)
    trainer.owned_dirs[asked] = claim.directory
    return claim, lock


def _claim(config: ConfigContainer, world: World, asked: Path, owned: RunDir | None) -> tuple[Claim, RunLock | None]:
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
    if not world.share(any(claim.directory.checkpoints.glob("checkpoint-*"))):
        raise RunExistsError(
            f"{claim.directory.path} holds a completed run with the same arguments, but no checkpoint to load its "
            "weights "
            f"from. Nothing was touched. {ways_out}"
        )
    if world.is_main:
        logger.warning("%s", already_finished(claim))
        lock = RunLock(claim.directory.lock)
    return claim, lock
