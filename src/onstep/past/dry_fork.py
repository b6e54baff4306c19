"""Trains the first steps of a fork in memory, beside what its parent did; nothing of it is kept."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from onstep.checkpoint import CheckpointInfo, resolve
from onstep.config.keys import own_copy
from onstep.errors import ConfigError
from onstep.events import Callback
from onstep.past.fork_directory import write_decisions
from onstep.past.forks import Fork
from onstep.past.leftovers import temporary_directory
from onstep.past.place import COPIED, Plan, last_step
from onstep.past.repetition import rewind
from onstep.past.search import values_of
from onstep.record import leading_records
from onstep.record.kinds import FILE_NAME
from onstep.training.runs.identity import IDENTITY_FILE

Curve = list[tuple[int, float]]
"""Pairs of a step and its loss."""


@dataclass(frozen=True)
class DryFork:
    """The losses of the steps after the fork, and those of the parent."""

    fork: Curve
    parent: Curve
    is_recorded: bool
    """Whether the parent's losses are those of its record; else it was repeated."""


def dry_fork(fork: Fork, num_steps: int, callbacks: Sequence[object] = ()) -> DryFork:
    """Train some steps of a fork without writing anything that lasts. Collective.

    Args:
        fork: from `plan_fork`; its directory is not made.
        num_steps: how many steps; fewer if the run ends before.
        callbacks: in any convention.

    Raises:
        ConfigError: if no step follows the fork's; on several ranks without a checkpoint of the step.
    """
    if not fork.is_exact and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            f"there is no checkpoint of step {fork.origin.step}, which --dry needs on several ranks; choose the step "
            f"of one, or drop --dry."
        )
    with temporary_directory("onstep-fork-") as temporary:
        start = fork.start if fork.is_exact else _state_at(fork, temporary)
        curve = _curve(fork, start, temporary / "fork", num_steps, callbacks)
        recorded = _recorded(fork, len(curve))
        if recorded is not None:
            return DryFork(curve, recorded, is_recorded=True)
        unchanged = replace(fork.origin, changes={}, without_samples=[], lr_factor=None)
        same = replace(fork, config=fork.before, found=[], origin=unchanged)
        return DryFork(curve, _curve(same, start, temporary / "parent", len(curve), callbacks), is_recorded=False)


class _Saves(Callback):
    """Saves at the end of a step."""

    ranks = "main"

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, context: Any) -> None:
        """Ask for it."""
        if context.step == self._step:
            context.control.save("the step of the fork")


def _state_at(fork: Fork, temporary: Path) -> CheckpointInfo:
    """A checkpoint of the fork's step, which the repeated parent saves."""
    step, target = fork.origin.step, temporary / "checkpoints"
    with rewind(fork.parent.path, step, callbacks=[_Saves(step)]) as past:
        past.finish_step()
        directory = past.job.run.run_dir
        assert directory is not None
        shutil.move(directory.checkpoints, target)
    return resolve(target, step=step)


def _curve(
    fork: Fork, start: CheckpointInfo | None, directory: Path, num_steps: int, callbacks: Sequence[object]
) -> Curve:
    """The losses of the first steps of a fork."""
    step, config, content = fork.origin.step, own_copy(fork.config), fork.parent.read()
    directory.mkdir()
    write_decisions(fork, directory, has_state=step > 0)
    for name in COPIED:
        if (fork.parent.path / name).is_file():
            shutil.copyfile(fork.parent.path / name, directory / name)
    if fork.found:
        config.checkpoint.on_config_change = "apply"
    if any(one.key.startswith(("dataset.", "tokenizer.")) for one in fork.found):
        content.pop("identity", None)
        (directory / IDENTITY_FILE).unlink(missing_ok=True)
    plan = Plan(directory=directory, step=step + 1, start=start, config=config, run_json=content, records=[])
    curve: Curve = []
    with rewind(directory, step + 1, callbacks=callbacks, plan=plan) as past:
        while True:
            curve.append((past.step, past.loss))
            if len(curve) == num_steps:
                return curve
            try:
                past.next()
            except ConfigError:  # the run has ended
                return curve


def _recorded(fork: Fork, num_steps: int) -> Curve | None:
    """The parent's losses of these steps by its record; None if it has not logged each of them by itself."""
    step, directory = fork.origin.step, fork.parent.path
    records = leading_records(directory / FILE_NAME)
    known = {at: values["loss"] for at, values in values_of(records, step + 1) if "loss" in values}
    last = min(step + num_steps, last_step(directory, fork.parent.read(), records))
    if fork.before.logger.log_interval != 1 or any(at not in known for at in range(step + 1, last + 1)):
        return None
    return [(at, known[at]) for at in range(step + 1, last + 1)]
