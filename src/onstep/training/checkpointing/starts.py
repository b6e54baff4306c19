"""Finds what a run continues from, and compares its configuration and files with those of that checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from onstep.checkpoint import CheckpointInfo, CheckpointManager, checkpoints, resolve
from onstep.checkpoint.catalog.discovery import named_dirs
from onstep.checkpoint.catalog.unfinished import is_unfinished
from onstep.config import ChangeClass, ConfigContainer
from onstep.config.derived import fill
from onstep.config.differences import Change, changes, decide, describe, left_to_policy, of_kind
from onstep.config.suggestions import shown
from onstep.distributed import ParallelSizes, attempt, on_main
from onstep.errors import CheckpointError, ConfigError
from onstep.events import Request
from onstep.events.control import STICKY
from onstep.mirror.copies import local_checkpoint
from onstep.stores.urls import is_url
from onstep.training.checkpointing.in_memory import StateInMemory
from onstep.training.run import Run
from onstep.training.runs.decisions import CHANGED, WITHDRAWN
from onstep.training.runs.identity import compare, trains_on_others, ways_to_continue
from onstep.training.runs.run_dir import RunDir
from onstep.training.runs.sent_commands import (
    commands_on_end,
    ids_to_repeat,
    is_cut,
    is_last_change,
    is_recorded,
    left_behind,
    steps_without,
    withdrawable,
)
from onstep.training.stages.agreement import append_decision

logger = logging.getLogger(__name__)

_LENGTH = ("train.train_iters", "train.train_samples", "train.num_epochs")
DECISIONS = "decisions"
"""The entry of a manifest's `extra` that says which decisions its state contains."""


def asked_start(config: ConfigContainer) -> str | None:
    """The start that `checkpoint.load` and `checkpoint.ckpt_step` request, as text; None if they request nothing."""
    checkpoint = config.checkpoint
    if checkpoint.load is None and checkpoint.ckpt_step is None:
        return None
    if checkpoint.finetune and checkpoint.load is not None:  # only its weights are loaded: see pretrained.py
        return None
    step = "" if checkpoint.ckpt_step is None else f" step {checkpoint.ckpt_step}"
    if checkpoint.load is None or is_url(checkpoint.load):
        return f"{checkpoint.load or 'own'}{step}"
    return f"{Path(checkpoint.load).expanduser().absolute()}{step}"


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


def requested_start(state: Run, root: Path) -> CheckpointInfo | None:
    """The checkpoint that `checkpoint.load` and `ckpt_step` name, found and verified on rank 0. Collective.

    Raises:
        CheckpointError: if it does not exist, on all ranks alike.
    """
    config = state.cfg.checkpoint
    load = None if config.load is None else Path(config.load).expanduser()

    def resolved() -> CheckpointInfo | None:
        if config.load is not None and is_url(config.load):
            step = "" if config.ckpt_step is None else f"@{config.ckpt_step}"
            return resolve(local_checkpoint(config.load + step))
        try:
            return resolve(load or root, step=config.ckpt_step)
        except CheckpointError as error:
            if load is None:
                raise CheckpointError(f"checkpoint.ckpt_step={config.ckpt_step}: {error}") from None
            own = root if state.run_dir is None else state.run_dir.path
            is_own = config.ckpt_step is None and load.resolve() in (root.resolve(), own.resolve())
            if is_own and not config.exit_on_missing_checkpoint and not named_dirs(root):
                return None  # nothing is saved yet
            raise

    return on_main(state.world, resolved)


def check_not_all_damaged(state: Run, root: Path) -> None:
    """Refuse to start from scratch where checkpoints exist of which none is usable; each reason has been logged.

    Collective.

    Raises:
        CheckpointError: listing them.
    """
    found = [path for _, kind, path in reversed(named_dirs(root)) if not kind and not is_unfinished(path)]
    there = state.world.share([path.name for path in found])
    if there:
        raise CheckpointError(
            f"none of the checkpoints in {root} can be used ({', '.join(there)}), and starting from scratch "
            f"would hide that. Restore one of them, or start a new run with {state.entry_point.new_run} or "
            f"{state.entry_point.new_place}."
        )


def compare_configuration(state: Run, info: CheckpointInfo) -> list[Change]:
    """Compare the checkpoint's configuration with the current one; the applied changes of what is learned.

    The differences of the run's own checkpoint have been accepted with its directory, perhaps by a process that
    died before it saved: the current values apply.

    Raises:
        CheckpointError: for a difference that `checkpoint.on_config_change` does not allow.
    """
    own = is_own(state, info)
    if not info.manifest.config:
        return []
    policy = state.cfg.checkpoint.on_config_change
    current = fill(state.cfg, state.world.data.size)
    if current.model.vocab_size is None:  # set from the tokenizer, which is not open yet
        current.model.vocab_size = info.manifest.config_section("model").get("vocab_size")
    try:
        # how a run starts is not compared
        found = [one for one in changes(info.manifest.config, current) if not one.key.startswith("checkpoint.")]
        is_accepted = own or (state.entry_point.accepts_changes and policy == "error")
        if is_accepted and left_to_policy(found, current):
            policy = current.checkpoint.on_config_change = state.cfg.checkpoint.on_config_change = "apply"
        decided = decide(found, current, policy, state.world.size)
    except ConfigError as error:
        raise CheckpointError(f"{info.path} was saved with a different configuration: {error}") from None
    if policy == "keep":
        state.cfg = decided
    if found and not own and state.world.is_main:
        logger.info("the configuration differs from that of %s:\n%s", info.path, describe(found))
    return of_kind(found, ChangeClass.TRAJECTORY) if policy == "apply" else []


def compare_identity(
    state: Run, start: CheckpointInfo | None, root: Path, known: Mapping[str, str]
) -> Mapping[str, str]:
    """Compare the current files with those that the checkpoint was trained on, unless the run directory already has.

    A run without a directory records its files beside its checkpoints. Where other
    training data is accepted, the schedule that its length gives is too. Collective.

    Args:
        state: the run.
        start: the checkpoint that it continues from, if any.
        root: the directory of its checkpoints.
        known: the digests that the run's directory has of its files.

    Returns:
        The digests of the current files.

    Raises:
        CheckpointError: for a difference that `checkpoint.on_config_change` does not allow; on all ranks alike.
    """
    if state.run_dir is None or (start is not None and not is_own(state, start)):
        found = on_main(state.world, lambda: _compared(state, start, root))
        known = known if found is None else found
    if start is not None and trains_on_others(start.manifest.extra.get("identity"), known):
        state.cfg.checkpoint.on_config_change = "apply"
    return known


def compare_layout(state: Run, info: CheckpointInfo) -> None:
    """Warn, on rank 0, where ranks divide the model otherwise than those that saved the checkpoint."""
    saved, current = info.manifest.layout.get("mesh", {}), divided_over(state.world.sizes)
    if saved != current and state.world.is_main:
        texts = [
            f"{ranks} rank{'s' * (ranks != 1)} ({', '.join(f'{axis} {axes[axis]}' for axis in axes) or 'replicas'})"
            for ranks, axes in ((info.manifest.world_size, saved), (state.world.size, current))
        ]
        logger.warning(
            "%s was saved on %s, and the run continues on %s: each sample is still read once, but sums over the ranks "
            "are rounded in another order from here on, so losses agree to rounding, not to the bit",
            info.path,
            *texts,
        )


def layout_of(state: Run) -> dict[str, Any]:
    """How a run is divided among its ranks; axes of one rank say nothing, and neither do replicas alone."""
    layout = {"world_size": state.world.data.size, "num_microbatches": state.num_microbatches}
    axes = divided_over(state.world.sizes)
    return {**layout, "mesh": axes} if axes else layout


def divided_over(sizes: ParallelSizes) -> dict[str, int]:
    """The axes of several ranks, if these divide the model; replicas alone do not."""
    axes = {axis: size for axis, size in asdict(sizes).items() if size > 1}
    return {} if set(axes) <= {"dp_replicate"} else axes


def is_own(state: Run, info: CheckpointInfo) -> bool:
    """Whether a checkpoint is in the run's own directory, or in the memory of its nodes."""
    own = state.run_dir
    return own is not None and (info.in_memory or info.path.parent.resolve() == own.checkpoints.resolve())


def record_lost_save(state: Run, root: Path) -> None:
    """Record that the newest checkpoint is saved, which a kill right after its commit prevented."""
    if state.run_dir is None or not state.world.is_main:
        return
    found, _ = attempt(lambda: checkpoints(root))  # all ranks raise the error when they look for a start
    if found and is_own(state, found[0]):
        _record_save(state, state.run_dir, found[0])


def newest_of_all(state: Run, manager: CheckpointManager, memory: StateInMemory | None) -> CheckpointInfo | None:
    """The newest state of the run: in memory or, if there is a newer one or none there, on the disk. Collective.

    No file of a checkpoint on the disk is read if the one in memory is as new as any name there.

    Raises:
        CheckpointError: see `newest_start`.
    """
    if memory is None or state.cfg.run.without_commands_from is not None:
        return newest_start(state, manager)
    found = memory.find()
    named = on_main(state.world, lambda: [step for step, kind, _ in named_dirs(manager.root) if not kind])
    if found is None or found.step < max(named, default=0):
        on_disk = newest_start(state, manager)
        found = on_disk if found is None or (on_disk is not None and on_disk.step > found.step) else found
    if found is not None and found.in_memory and state.run_dir is not None and state.world.is_main:
        _record_save(state, state.run_dir, found)
    return found


def _record_save(state: Run, directory: RunDir, info: CheckpointInfo) -> None:
    """Record that a checkpoint is saved, unless that is recorded."""
    captured = info.manifest.extra.get(DECISIONS)
    if captured and is_cut(directory.decisions, captured):
        logger.warning(
            "%s has lost lines that the run had written when it saved the checkpoint of step %d; commands that it "
            "was sent after it may be lost too, and are then not repeated.",
            directory.decisions,
            info.step,
        )
    if captured and not is_recorded(directory.decisions, info.step, captured):
        reason = "recorded by the next process: the one that saved it was killed right after it"
        details = {"checkpoint_step": info.step, "path": str(info.path), **captured}
        append_decision(state, Request("saved", "the loop", "", reason, 0, details), info.step)


def leave_commands(state: Run, info: CheckpointInfo) -> None:
    """Record which commands belong to the branch that the user leaves: no later start repeats them."""
    if state.run_dir is None or not state.world.is_main:
        return
    left = left_behind(state.run_dir.decisions, info.step if is_own(state, info) else None)
    if left:
        reason, details = f"the run continues from {info.path}", {"command_ids": ids_to_repeat(left)}
        append_decision(state, Request(WITHDRAWN, "the loop", "", reason, 0, details), info.step)


def lift_end(run: Run, changes: Sequence[Change]) -> None:
    """Lift what would end the run although its user continues it with other settings.

    That is a decided stop, one that is still to be repeated and, if the length is among the settings, a number of steps
    that was set while it ran. Each start from an older checkpoint lifts it again, but not what was sent since.
    """
    if not changes:
        return
    ending = run.ending
    has_other_length = any(one.key in _LENGTH for one in changes)
    for flag in STICKY:
        run.control.clear(flag)
    stopped_by, ending.stopped_by = ending.stopped_by, None
    num_steps = run.train_state.overrides.pop("train_iters", None) if has_other_length else None
    if not run.world.is_main:
        return
    settings = ", ".join(f"{one.key} was {shown(one.old)} and is {shown(one.new)}" for one in changes)
    lifted = [] if run.run_dir is None else _replace_commands(run, run.run_dir.decisions, settings, has_other_length)
    if stopped_by is not None and not stopped_by.is_steered:
        lifted.append(str(stopped_by))
    for what in lifted:
        logger.warning("the run continues with other settings (%s); no longer in force: %s", settings, what)
    if num_steps is not None and not lifted:
        logger.info("train_iters=%s, which was set while the run ran, is no longer in force", num_steps)


def _replace_commands(run: Run, decisions: Path, settings: str, has_other_length: bool) -> list[str]:
    """Record, once, that the run continues with other settings, and which commands they replace; the commands."""
    if is_last_change(decisions, settings):
        return []
    commands = commands_on_end(decisions, with_length=has_other_length)
    replaced = {one.request.details["command_id"]: f"after step {one.step}: {one.request}" for one in commands[::-1]}
    reason = "; ".join([settings, *(f"no longer in force: {what}" for what in replaced.values())])
    details = {"settings": settings, "command_ids": list(replaced)}
    append_decision(run, Request(CHANGED, "checkpoint.on_config_change", "", reason, 0, details))
    return list(replaced.values())


def _compared(state: Run, start: CheckpointInfo | None, root: Path) -> dict[str, str] | None:
    """The digests of the current files; None for data that is not configured."""
    current = state.entry_point.identify(state.cfg)
    if current is None:
        return None
    if start is not None:
        policy = state.cfg.checkpoint.on_config_change
        # the checkpoint's weights replace those that a Trainer was given
        recorded, without = start.manifest.extra.get("identity"), ("weights",)
        result = compare(recorded, current, *start.path.parents[:2], without=without)
        if result.changed and policy != "apply" and not state.entry_point.accepts_changes:
            raise CheckpointError(
                f"{start.path} was trained on other files: {result.changed}. {ways_to_continue(policy)}"
            )
        for note in result.notes:
            logger.warning("%s: %s", start.path, note)
    if state.run_dir is None and current.parts:
        root.mkdir(parents=True, exist_ok=True)
        current.write(root)
    return current.digests
