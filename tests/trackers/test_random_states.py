"""A run has the same random states, and so the same certificate, with and without the clients of services."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from onstep import Callback, JsonLogger, pretrain
from onstep.callbacks import TrackersCallback
from onstep.config import ConfigContainer
from onstep.trackers import RunIdentity
from tests.support.tracker_reading import mlflow_points, mlflow_runs, without_keys
from tests.support.waiting import PATIENCE, until
from tests.support.whole_runs import check_same, left_by

CLIENT = """
import random
import threading
from random import choice

drawn, stops = [random.random()], threading.Event()


def draw():
    from random import shuffle

    shuffle([1, 2, 3])
    choice([1, 2, 3])
    drawn.append(random.random())


def draw_on():
    while not stops.wait(0.001):
        draw()


thread = threading.Thread(target=draw_on, daemon=True)
"""


class Client:
    """A tracker whose package draws while it is imported, when it is called, and in a thread."""

    name, package = "drawing", "drawing_client"
    keeps_names = takes_back = False
    client: Any = None

    def open(self, run: RunIdentity, state: Mapping[str, Any]) -> None:
        self.client = import_module("drawing_client")
        self.client.thread.start()

    def log(self, metrics: Mapping[str, float], step: int, timestamp: float) -> None:
        self.client.draw()

    def text(self, tag: str, text: str, step: int) -> None:
        self.client.draw()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def close(self, status: str) -> None:
        self.client.stops.set()
        self.client.thread.join()


class Draws(Callback):
    """Uses Python's generator in training, as a schedule or an augmentation of one's own does.

    Args:
        are_open: whether all trackers are open, for which it waits after the first step.
    """

    def __init__(self, are_open: Callable[[], bool]) -> None:
        self.drawn: list[float] = []
        self._are_open = are_open

    def on_step_end(self, context: Any) -> None:
        until(self._are_open)
        self.drawn.append(random.random())


def trained(config: ConfigContainer, directory: Path, *trackers: Any) -> tuple[dict[str, Any], list[float]]:
    """What a run with these trackers leaves, and the numbers that were drawn in it."""
    config.run.name, config.run.output_dir = "run", str(directory)
    config.logger.log_interval, config.checkpoint.save_interval, config.checkpoint.certify = 1, 4, True
    reports = TrackersCallback(["csv", *trackers], close_timeout=PATIENCE)
    draws = Draws(lambda: all(getattr(one, "client", "") is not None for one in reports.trackers))
    pretrain(config, callbacks=[JsonLogger(), reports, draws])
    return left_by(directory / "run"), draws.drawn


def test_a_client_draws_from_a_generator_of_its_own(
    tiny_config: ConfigContainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "drawing_client.py").write_text(CLIENT)
    monkeypatch.syspath_prepend(tmp_path)
    expected, drawn = trained(tiny_config, tmp_path / "without")
    found, drawn_beside = trained(tiny_config, tmp_path / "with", Client())
    client: Any = sys.modules.pop("drawing_client")
    assert len(set(client.drawn)) == len(client.drawn) >= 9
    assert drawn_beside == drawn
    check_same(found, expected)


@pytest.mark.slow
def test_services_leave_the_certificate_of_a_run(
    tiny_config: ConfigContainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_keys(monkeypatch, tmp_path)
    expected, drawn = trained(tiny_config, tmp_path / "without")
    found, drawn_beside = trained(tiny_config, tmp_path / "with", "wandb", "mlflow", "comet")
    assert drawn_beside == drawn
    assert found["files"]["rng/rank_0.json"] == expected["files"]["rng/rank_0.json"]
    assert found["certificates"] == expected["certificates"]
    check_same(found, expected)
    client, [one] = mlflow_runs(tmp_path / "with" / "run")
    assert len(mlflow_points(client, one, "train/loss")) == 8
