"""Runs that are interrupted and continued, and what has to be the same afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from onstep import CallbackManager, JsonLogger, pretrain
from onstep.config import ConfigContainer
from tests.support.counting import Counting
from tests.support.whole_runs import check_same, left_by


class CountingEpochs(Counting):
    """Counts the ends of epochs too."""

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.calls.append(f"epoch end {state.global_step}")


class Interrupted(Exception):
    """The process could have died here: nothing of the run's own code runs after it but its ending."""


def start(config: ConfigContainer, *, dies_at: tuple[str, int] | None = None) -> Counting:
    """Start or continue a run; `dies_at` is an event and how often it must have been fired by then."""
    counting = CountingEpochs()
    manager = CallbackManager()
    manager.add([JsonLogger(), counting])
    if dies_at is None:
        pretrain(config, callbacks=manager)
        return counting
    event, number = dies_at
    calls = iter(range(1, 1_000_000))

    def die(context: Any) -> None:
        if next(calls) == number:
            raise Interrupted

    manager.register(event, die)
    with pytest.raises(Interrupted):
        pretrain(config, callbacks=manager)
    return counting


def outcome(config: ConfigContainer, counting: Counting) -> dict[str, Any]:
    """Everything that an interruption must not change."""
    found = left_by(Path(config.run.output_dir) / str(config.run.name))
    assert found["weights"] is not None
    assert found["certificates"]
    return {**found, "told": counting.calls}


def compare(
    make: Callable[[str], ConfigContainer], deaths: Iterable[tuple[str, int]], expected: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Check that a run that dies at all of `deaths`, one after the other, ends as the uninterrupted one."""
    if expected is None:
        whole = make("whole")
        expected = outcome(whole, start(whole))
    config = make("killed-" + "-".join(f"{event}{number}" for event, number in deaths))
    for death in deaths:
        start(config, dies_at=death)
    check_same(outcome(config, start(config)), expected)
    return expected
