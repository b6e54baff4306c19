"""Decides which checkpoints to keep: the last k, every n-th step and the best n, each in addition to the others."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from onstep.checkpoint.catalog.discovery import (
    ASIDE,
    CheckpointInfo,
    checkpoints,
    left_branches,
    named_dirs,
    verify_shown,
)
from onstep.checkpoint.storage.manifest import Manifest
from onstep.checkpoint.storage.store import FileStore
from onstep.config.hf.arguments import is_greater_better as is_greater_better_by_name
from onstep.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Retention:
    """Rules for which checkpoints to keep. They add up: a checkpoint is kept if any rule keeps it.

    Raises:
        ConfigError: for a number that is out of range.
    """

    most_recent_k: int = -1
    """How many of the newest to keep; -1 keeps all. The newest one is always kept."""
    keep_every_n: int | None = None
    """Keep checkpoints whose step is a multiple of this."""
    keep_best_n: int = 0
    """How many of the best by `metric` to keep."""
    metric: str = "loss"
    """With or without its `eval_` prefix; a value from evaluation has priority over one from training."""
    greater_is_better: bool | None = None
    """None means False for names ending in `loss` or `perplexity`, else True."""
    steps_to_keep: Callable[[], Collection[int]] = tuple
    """Gives the steps that the run will go back to: the newest checkpoint up to each is kept."""

    def __post_init__(self) -> None:
        if self.most_recent_k < -1:
            raise ConfigError(f"most_recent_k must be >= 0, or -1 to keep all, got {self.most_recent_k}.")
        if self.keep_every_n is not None and self.keep_every_n < 1:
            raise ConfigError(f"keep_every_n must be >= 1, or None to disable the rule, got {self.keep_every_n}.")
        if self.keep_best_n < 0:
            raise ConfigError(f"keep_best_n must be >= 0, got {self.keep_best_n}.")


def to_delete(
    infos: Iterable[CheckpointInfo],
    retention: Retention,
    *,
    newest: int | None = None,
    run_id: str | None = None,
) -> list[CheckpointInfo]:
    """The checkpoints that no rule keeps, oldest first.

    Of the non-persistent checkpoints only the newest is kept; no other rule applies to them. The result never contains
    the newest checkpoint, nor anything newer than `newest`: such a checkpoint was rejected or belongs to an abandoned
    branch, and must not count as recent.

    Args:
        infos: the existing checkpoints.
        retention: the rules.
        newest: step of the newest verified checkpoint; None means the newest of all.
        run_id: ignore checkpoints of other runs; None means all belong to one run.
    """
    own = sorted((info for info in infos if run_id in (None, info.manifest.run_id)), key=lambda info: info.step)
    own = [info for info in own if newest is None or info.step <= newest]
    if not own:
        return []
    newest_temporary = [info.step for info in own if not info.manifest.persistent][-1:]
    asked = {max((info.step for info in own if info.step <= step), default=step) for step in retention.steps_to_keep()}
    kept = {own[-1].step, *asked, *_kept_persistent(own, retention), *newest_temporary}
    return [info for info in own if info.step not in kept]


def delete_surplus(store: FileStore, root: Path, retention: Retention, *, newest: int, run_id: str) -> None:
    """Delete the checkpoints that no rule keeps, see `to_delete`; a failure is logged, as it does not fail a save."""
    try:
        for info in to_delete(checkpoints(root), retention, newest=newest, run_id=run_id):
            store.remove_tree(info.path)
    except CheckpointError as error:
        logger.warning("An old checkpoint could not be deleted: %s", error)


def best(infos: Iterable[CheckpointInfo], retention: Retention) -> CheckpointInfo | None:
    """The checkpoint with the best value of the metric, the oldest in case of a tie; None if none has a value.

    Args:
        infos: the checkpoints to choose from.
        retention: the metric and its direction.
    """
    ranked = _ranked(infos, retention)
    return ranked[0] if ranked else None


def metric_value(info: CheckpointInfo, name: str) -> float | None:
    """The value by which a checkpoint is ranked; None if it is missing or NaN."""
    bare = name.removeprefix("eval_")
    for key in (f"eval_{bare}", bare):
        value = info.manifest.metrics.get(key)
        if value is not None and not math.isnan(value):
            return value
    return None


def _kept_persistent(own: list[CheckpointInfo], retention: Retention) -> set[int]:
    persistent = [info for info in own if info.manifest.persistent]
    every, recent = retention.keep_every_n, retention.most_recent_k
    kept = {info.step for info in (persistent if recent == -1 else persistent[max(0, len(persistent) - recent) :])}
    kept |= {info.step for info in persistent if every is not None and info.step % every == 0}
    return kept | {info.step for info in _ranked(persistent, retention)[: retention.keep_best_n]}


def _ranked(infos: Iterable[CheckpointInfo], retention: Retention) -> list[CheckpointInfo]:
    sign = -1.0 if is_greater_better(retention.metric, retention.greater_is_better) else 1.0
    valued = [(metric_value(info, retention.metric), info) for info in infos]
    ranked = [(sign * value, info.step, info) for value, info in valued if value is not None]
    return [info for _, _, info in sorted(ranked, key=lambda item: item[:2])]


def is_greater_better(metric: str, configured: bool | None) -> bool:
    """Whether greater values of a metric are better: as configured, else unless its name is that of a loss."""
    return is_greater_better_by_name(metric) if configured is None else configured


def best_verified(root: Path, retention: Retention, report: Callable[[str], None]) -> CheckpointInfo | None:
    """The checkpoint with the best metric that passes verification, or None.

    Args:
        root: directory of the checkpoints.
        retention: names the metric and its direction.
        report: called with a message for each better checkpoint that is rejected.

    Raises:
        CheckpointError: if the directory cannot be listed.
    """
    infos = checkpoints(root)
    while (info := best(infos, retention)) is not None:
        try:
            verify_shown(info.path)
        except CheckpointError as error:
            infos.remove(info)
            then = "falling back to the next best" if best(infos, retention) else "and no other has the metric"
            report(f"Checkpoint {info.path.name} is rejected, {then}: {error}")
        else:
            return info
    return None


def set_aside(store: FileStore, root: Path, step: int) -> Path | None:
    """Move all checkpoints after `step`, including damaged ones, into a new directory below `aside`.

    The newest is moved first: after a crash in between, those nearest to `step` remain.

    Returns:
        The new directory; None if there was nothing to move.

    Raises:
        CheckpointError: if one cannot be moved.
    """
    newer = [directory for found, kind, directory in named_dirs(root) if found > step and not kind]
    if not newer:
        return None
    branches = (root / ASIDE / f"branch-{number}" for number in count(1))
    branch = next(path for path in branches if not os.path.lexists(path))
    store.make_root(branch)
    for path in newer:
        store.rename(path, branch / path.name)
    store.sync_dir(branch)
    store.sync_dir(root)
    return branch


def bring_back(store: FileStore, root: Path, step: int, order: Callable[[Manifest], int | None]) -> Path | None:
    """Move a checkpoint of `step` from below `aside` back into `root`, unless `root` has one of this step.

    Args:
        store: moves it.
        root: directory of the checkpoints.
        step: the checkpoint's.
        order: of several, the one with the highest value is moved, and of equal ones the newest; None for one that is
            not wanted.

    Returns:
        Where it was; None if nothing was moved.

    Raises:
        CheckpointError: if it cannot be moved.
    """
    if any(found == step and not kind for found, kind, _ in named_dirs(root)):
        return None
    wanted: list[tuple[int, int, Path]] = []
    for branch in left_branches(root):
        for info in checkpoints(root / branch):
            value = order(info.manifest) if info.step == step else None
            if value is not None:
                wanted.append((value, info.path.stat().st_mtime_ns, info.path))
    if not wanted:
        return None
    path = max(wanted)[-1]
    store.rename(path, root / path.name)
    store.sync_dir(path.parent)
    store.sync_dir(root)
    return path
