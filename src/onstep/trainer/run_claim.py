"""The folder of a Trainer's run: who may train into it."""

from __future__ import annotations

from pathlib import Path

from onstep.config import ConfigContainer
from onstep.distributed import World
from onstep.errors import RunExistsError
from onstep.trainer.base_trainer import BaseTrainer
from onstep.training.pretrain import claim_for_all
from onstep.training.run_folder import RunFolder


def claim_folder(trainer: BaseTrainer, config: ConfigContainer, world: World) -> RunFolder | None:
    """Take the run's folder, or take it again if this Trainer has it already; None for a run without one. Collective.

    Raises:
        RunExistsError: when the folder holds another run, or a completed one of the same arguments.
        ConfigError: when it cannot be written.
    """
    if config.run.name is None:
        return None
    asked = Path(config.run.output_dir).absolute() / config.run.name
    folder = trainer.owned_folders.get(asked)
    if folder is not None:
        if world.is_main:
            folder.write({**folder.read(), "status": "running", "step": 0})
        return folder
    folder = _claim(config, world, asked)
    trainer.owned_folders[asked] = folder
    return folder


def _claim(config: ConfigContainer, world: World, asked: Path) -> RunFolder:
    beside = f"config_overrides={{'run.fresh': True}} for {asked.name}-2 beside it"
    ways_out = f"In TrainingArguments: another output_dir, or {beside}."
    try:
        claim = claim_for_all(config, world)
    except RunExistsError as error:
        raise RunExistsError(f"{error} {ways_out}") from None
    assert claim is not None
    if claim.is_finished:
        raise RunExistsError(
            f"{claim.folder.path} holds a completed run of the same arguments. Nothing was touched. {ways_out}"
        )
    return claim.folder
