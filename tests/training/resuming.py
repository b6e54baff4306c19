"""Runs that are interrupted and continued, and what has to be the same afterwards."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from onstep import CallbackManager, JsonLogger, TrainerCallback, pretrain
from onstep.checkpoint import newest_verified
from onstep.config import ConfigContainer
from onstep.metrics_log import read_records, without_wall_clock


class Interrupted(Exception):
    """The process could have died here: nothing of the run's own code runs after it but its ending."""


class Counting(TrainerCallback):
    """A callback with a state that depends on everything it was told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.told.append(f"step {state.global_step}")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.told.append(f"log {state.global_step} {logs.get('loss')}")

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        self.told.append(f"evaluate {state.global_step} {metrics['eval_loss']}")

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.told.append(f"epoch end {state.global_step}")

    def state_dict(self) -> dict[str, Any]:
        return {"told": list(self.told)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.told = list(state_dict["told"])


def start(config: ConfigContainer, *, dies_at: tuple[str, int] | None = None) -> Counting:
    """Start or continue a run; `dies_at` is an event and how often it must have been told by then."""
    counting = Counting()
    manager = CallbackManager()
    manager.add([JsonLogger(), counting])
    if dies_at is None:
        pretrain(config, callbacks=manager)
        return counting
    event, number = dies_at
    told = iter(range(1, 1_000_000))

    def die(context: Any) -> None:
        if next(told) == number:
            raise Interrupted

    manager.register(event, die)
    with pytest.raises(Interrupted):
        pretrain(config, callbacks=manager)
    return counting


def outcome(config: ConfigContainer, counting: Counting) -> dict[str, Any]:
    """Everything that an interruption must not change."""
    folder = Path(config.run.output_dir) / str(config.run.name)
    newest = newest_verified(folder / "checkpoints")
    assert newest is not None
    manifest = newest.manifest
    model = {path: entry.blake3 for path, entry in manifest.files.items() if path.startswith(("model/", "optimizer/"))}
    certificate = json.loads((folder / "certificate" / "rank_0.json").read_text())
    return {
        "step": newest.step,
        "files": {**model, **{path: manifest.files[path].blake3 for path in manifest.files if path.startswith("rng/")}},
        "weights": hashlib.sha256((folder / "model" / "model.safetensors").read_bytes()).hexdigest(),
        "journal": [without_wall_clock(record) for record in read_records(folder / "trainer_logs.json")],
        "certificate": certificate,
        "told": counting.told,
    }


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
    found = outcome(config, start(config))
    for part, value in expected.items():
        assert found[part] == value, part
    return expected
