"""Which checkpoints are kept: the last k, every n-th step and the best n, each in addition to the others."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from onstep.checkpoint.catalog.discovery import ASIDE, CheckpointInfo, checkpoints, named_folders, verify_shown
from onstep.checkpoint.storage.store import FileStore
from onstep.errors import CheckpointError, ConfigError


@dataclass(frozen=True)
class Retention:
    """What to keep. The rules add up: a checkpoint stays if any of them wants it.

    Raises:
        ConfigError: for a number that has no meaning.
    """

    most_recent_k: int = -1
    """How many of the newest; -1 keeps all. The newest one stays in any case."""
    keep_every_n: int | None = None
    """Those of steps that are a multiple of this."""
    keep_best_n: int = 0
    """How many of the best by `metric`."""
    metric: str = "loss"
    """With or without its `eval_` prefix; the value of an evaluation counts before one of training."""
    greater_is_better: bool | None = None
    """None is False for names that end in `loss` or `perplexity`, else True."""

    def __post_init__(self) -> None:
        if self.most_recent_k < -1:
            raise ConfigError(f"most_recent_k must be >= 0, or -1 to keep all, got {self.most_recent_k}.")
        if self.keep_every_n is not None and self.keep_every_n < 1:
            raise ConfigError(f"keep_every_n must be >= 1, or None for no such rule, got {self.keep_every_n}.")
        if self.keep_best_n < 0:
            raise ConfigError(f"keep_best_n must be >= 0, got {self.keep_best_n}.")


def to_delete(
    infos: Iterable[CheckpointInfo],
    retention: Retention,
    protected: Collection[int] = (),
    *,
    newest: int | None = None,
    run_id: str | None = None,
) -> list[CheckpointInfo]:
    """The checkpoints that no rule keeps, oldest first.

    Of those that are not persistent only the newest is kept, by no other rule. The newest checkpoint is never among the
    result, and neither is anything newer than `newest`: what lies there was refused or belongs to a branch that the
    run has left, and must not count as recent.

    Args:
        infos: what is there.
        retention: the rules.
        protected: steps that stay.
        newest: step of the newest verified checkpoint; None is the newest of all.
        run_id: leave checkpoints of other runs alone; None is one run.
    """
    own = sorted((info for info in infos if run_id in (None, info.manifest.run_id)), key=lambda info: info.step)
    own = [info for info in own if newest is None or info.step <= newest]
    if not own:
        return []
    newest_temporary = [info.step for info in own if not info.manifest.persistent][-1:]
    kept = {own[-1].step, *protected, *_kept_persistent(own, retention), *newest_temporary}
    return [info for info in own if info.step not in kept]


def best(infos: Iterable[CheckpointInfo], retention: Retention) -> CheckpointInfo | None:
    """The checkpoint with the best value of the metric, of equal ones the oldest; None if none has a value."""
    ranked = _ranked(infos, retention)
    return ranked[0] if ranked else None


def metric_value(info: CheckpointInfo, name: str) -> float | None:
    """The value a checkpoint is judged by; None where it has none, or NaN."""
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
    greater = retention.greater_is_better
    if greater is None:
        greater = not retention.metric.endswith(("loss", "perplexity"))
    sign = -1.0 if greater else 1.0
    valued = [(metric_value(info, retention.metric), info) for info in infos]
    ranked = [(sign * value, info.step, info) for value, info in valued if value is not None]
    return [info for _, _, info in sorted(ranked, key=lambda item: item[:2])]


def best_verified(root: Path, retention: Retention, report: Callable[[str], None]) -> CheckpointInfo | None:
    """The checkpoint with the best metric whose every file is as it was written, or None.

    Args:
        root: the folder of the checkpoints.
        retention: names the metric and its direction.
        report: told of each better one that is refused, and why.

    Raises:
        CheckpointError: when the folder cannot be listed.
    """
    infos = checkpoints(root)
    while (info := best(infos, retention)) is not None:
        try:
            verify_shown(info.path)
        except CheckpointError as error:
            infos.remove(info)
            then = "falling back to the next best" if best(infos, retention) else "and no other has the metric"
            report(f"Checkpoint {info.path.name} is refused, {then}: {error}")
        else:
            return info
    return None


def set_aside(store: FileStore, root: Path, step: int) -> Path | None:
    """Move all checkpoints after `step`, damaged ones too, into a new folder of `aside`; gives it if there were any.

    The newest goes first: after a crash in between, what is left is the nearest to `step`.

    Raises:
        CheckpointError: when one cannot be moved.
    """
    newer = [folder for found, kind, folder in named_folders(root) if found > step and not kind]
    if not newer:
        return None
    branches = (root / ASIDE / f"branch-{number}" for number in count(1))
    branch = next(path for path in branches if not os.path.lexists(path))
    store.make_root(branch)
    for path in newer:
        store.rename(path, branch / path.name)
    store.sync_folder(branch)
    store.sync_folder(root)
    return branch
