"""Says what a run continues from, and compares the files that it is trained on with those of that checkpoint."""

from __future__ import annotations

import logging
from pathlib import Path

from onstep.checkpoint import CheckpointInfo, CheckpointManager
from onstep.config import ConfigContainer
from onstep.distributed import attempt
from onstep.errors import CheckpointError
from onstep.training.run import Run
from onstep.training.runs.identity import Identity, compare, trains_on_others, ways_to_continue
from onstep.training.runs.steering import steps_without, withdrawable

logger = logging.getLogger(__name__)


def asked_start(config: ConfigContainer) -> str | None:
    """The start that `checkpoint.load` and `checkpoint.ckpt_step` request, as text; None if they request nothing."""
    checkpoint = config.checkpoint
    if checkpoint.load is None and checkpoint.ckpt_step is None:
        return None
    if checkpoint.finetune and checkpoint.load is not None:  # only its weights are loaded: see pretrained.py
        return None
    step = "" if checkpoint.ckpt_step is None else f" step {checkpoint.ckpt_step}"
    return f"{Path(checkpoint.load).absolute() if checkpoint.load else 'own'}{step}"


def newest_start(state: Run, manager: CheckpointManager) -> CheckpointInfo | None:
    """The run's newest verified checkpoint that contains none of the commands that are to be withdrawn. Collective.

    Raises:
        CheckpointError: if all contain one, on all ranks alike.
    """
    from_step, directory = state.cfg.run.without_commands_from, state.run_dir
    if from_step is None or directory is None:
        return manager.newest()
    steps: list[int] | None = None
    if state.world.is_main and (commands := withdrawable(directory.decisions, from_step)):
        steps = steps_without(directory.decisions, commands)
    steps = state.world.share(steps)
    if steps is None:
        return manager.newest()
    for step in steps:
        found = manager.newest(step)
        if found is None or found.step in steps:
            break
    else:
        found = None
    if found is None and state.world.share(directory.has_checkpoints):
        raise CheckpointError(
            f"run.without_commands_from={from_step}: every checkpoint in {directory.checkpoints} contains a command "
            f"that was applied after step {from_step} or later; train a new run without it (run.fresh=true)."
        )
    return found


def compare_identity(state: Run, start: CheckpointInfo | None, root: Path) -> None:
    """Compare the current files with those that the checkpoint was trained on, unless the run directory already has.

    Sets `state.saving.identity`. A run without a directory records its files beside its checkpoints. Where other
    training data is accepted, the schedule that its length gives is too. Collective.

    Args:
        state: the run.
        start: the checkpoint that it continues from, if any.
        root: the directory of its checkpoints.

    Raises:
        CheckpointError: for a difference that `checkpoint.on_config_change` does not allow; on all ranks alike.
    """
    identify = state.entry_point.identify
    if identify is not None and (state.run_dir is None or (start is not None and not is_own(state, start))):
        found, error = (
            attempt(lambda: _compared(state, start, root, identify(state.cfg))) if state.world.is_main else (None, None)
        )
        found, error = state.world.share((found, error))
        if error is not None:
            raise error
        state.saving.identity = found
    if start is not None and trains_on_others(start.manifest.extra.get("identity"), state.saving.identity):
        state.cfg.checkpoint.on_config_change = "apply"


def is_own(state: Run, info: CheckpointInfo) -> bool:
    """Whether a checkpoint is in the run's own directory."""
    own = state.run_dir
    return own is not None and info.path.parent.resolve() == own.checkpoints.resolve()


def _compared(state: Run, start: CheckpointInfo | None, root: Path, current: Identity) -> dict[str, str]:
    """The digests of the current files."""
    if start is not None:
        policy = state.cfg.checkpoint.on_config_change
        # the checkpoint's weights replace those that a Trainer was given
        recorded, without = start.manifest.extra.get("identity"), ("weights",)
        result = compare(recorded, current, *start.path.parents[:2], without=without)
        if result.changed and policy != "apply" and state.trainer is None:
            raise CheckpointError(
                f"{start.path} was trained on other files: {result.changed}. {ways_to_continue(policy)}"
            )
        for note in result.notes:
            logger.warning("%s: %s", start.path, note)
    if state.run_dir is None and current.parts:
        root.mkdir(parents=True, exist_ok=True)
        current.write(root)
    return current.digests
