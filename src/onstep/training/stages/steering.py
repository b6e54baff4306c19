"""Applies what was asked of the run while it runs: values that were set, and commands that callbacks carry out."""

from __future__ import annotations

import logging

from onstep.training.run import Run
from onstep.training.runs.steering import Steering, decisions_after
from onstep.training.stages.agreement import write_decision
from onstep.training.stages.job import Job

logger = logging.getLogger(__name__)


def apply_overrides(job: Job) -> None:
    """Apply values that were set during the run and act outside the loop's own decisions."""
    steering, overrides, scheduler = job.steering, job.run.train_state.overrides, job.scales_rates
    if scheduler is not None:
        factor = overrides.get("lr_factor", 1.0)
        if scheduler.lr_factor != factor:
            scheduler.lr_factor = factor
    if steering.applied != overrides:
        steering.applied = dict(overrides)
        if scheduler is None and "lr_factor" in overrides and job.run.world.is_main:
            logger.warning("lr_factor=%s has no effect: the run's scheduler cannot be scaled", overrides["lr_factor"])
        _apply_to_callbacks(job.run, steering)


def _apply_to_callbacks(run: Run, steering: Steering) -> None:
    overrides, declared = run.train_state.overrides, run.control.declared
    for key, one in declared.items():
        if key in overrides:
            steering.configured.setdefault(key, (one, one.value))
            one.put(overrides[key])
        elif key in steering.configured:
            was_declared, value = steering.configured.pop(key)
            was_declared.put(value)
    missing = [key for key in overrides if "." in key and key not in declared]
    if missing and run.world.is_main:
        logger.warning("set in an earlier part of this run, but no callback declares it now: %s", ", ".join(missing))


def fire_commands(job: Job) -> None:
    """Let callbacks carry out the commands that ranks have agreed on, and record each with its result."""
    commands, job.steering.commands = job.steering.commands, []
    for request in commands:
        job.notify.on_command(request=request)
        write_decision(job.run, request)


def load_repeats(run: Run) -> None:
    """Read what the run was asked for between its checkpoint and its interruption, to repeat it; on rank 0."""
    checkpoints, directory = run.checkpoints, run.run_dir
    if run.world.is_main and directory is not None and checkpoints is not None and checkpoints.start is not None:
        found = decisions_after(directory.decisions, checkpoints.start.step, is_chosen=run.stage.is_chosen_start)
        run.features.room(Steering).repeats = found


def repeat_decisions(job: Job) -> None:
    """Request again what the run was asked for after this step, before it was interrupted."""
    repeats, step = job.steering.repeats, job.run.train_state.step
    while repeats and repeats[0][0] <= step:
        job.run.control.add_request(repeats.popleft()[1])
