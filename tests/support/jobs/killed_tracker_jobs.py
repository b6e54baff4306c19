"""What the processes of the trackers' tests run: small real trainings with trackers, killed where their settings
say.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onstep import CallbackManager, JsonLogger, pretrain
from onstep.callbacks import TrackersCallback
from onstep.config import ConfigContainer, apply_overrides
from onstep.trackers import RunIdentity, Tracker, make_tracker
from tests.support.small_configs import small_pretrain_config
from tests.support.waiting import PATIENCE


def small_config(settings: dict[str, Any]) -> ConfigContainer:
    """11 steps: a log at every step, an evaluation at every second, a checkpoint at every third."""
    config = small_pretrain_config(settings["corpus"] + "/colorsys.py", settings["cache"])
    config.run.name, config.run.output_dir, config.run.save_weights = "run", settings.get("output_dir", "runs"), False
    config.dataset.num_workers = 0
    config.train.global_batch_size = config.train.micro_batch_size = 4
    config.train.train_iters = 11
    config.logger.log_interval, config.validation.eval_on_start = 1, True
    config.validation.eval_interval, config.validation.eval_iters = 2, 1
    config.checkpoint.save_interval = 3
    apply_overrides(config, settings.get("words", []))
    return config


def job_train(settings: dict[str, Any]) -> None:
    """Train with every tracker that `trackers` names, and be killed at the `number`-th call at `event`."""
    manager = CallbackManager()
    trackers = TrackersCallback(settings.get("sinks", ["csv", "tensorboard"]))
    manager.add([JsonLogger(), trackers])
    notified = iter(range(1, 1_000_000))

    def die(context: Any) -> None:
        if next(notified) == settings["number"]:
            os.kill(os.getpid(), signal.SIGKILL)

    if "event" in settings:
        manager.register(settings["event"], die)
    pretrain(small_config(settings), callbacks=manager)
    Path("ended.json").write_text(json.dumps({"ended": True}))


class Watched:
    """A tracker that counts the points it was given."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker, self.name, self.takes_back, self.keeps_names = tracker, tracker.name, False, tracker.keeps_names
        self.num_points = 0
        self.is_open = False

    def open(self, run: RunIdentity, state: Mapping[str, Any]) -> None:
        self.tracker.open(run, state)
        self.is_open = True

    def log(self, metrics: Mapping[str, float], step: int, timestamp: float) -> None:
        self.tracker.log(metrics, step, timestamp)
        self.num_points += 1

    def text(self, tag: str, text: str, step: int) -> None:
        self.tracker.text(tag, text, step)

    def state_dict(self) -> dict[str, Any]:
        return self.tracker.state_dict()

    def close(self, status: str) -> None:
        self.tracker.close(status)


def job_watched(settings: dict[str, Any]) -> None:
    """Train with the trackers of `trackers`; be killed after step `kill_after`, with `waits` once they have all
    points.
    """
    manager = CallbackManager()
    watched = [Watched(make_tracker(name)) for name in settings["sinks"]]
    trackers = TrackersCallback(watched)
    manager.add([JsonLogger(), trackers])

    def die(context: Any) -> None:
        if context.trainer_state.global_step == settings["kill_after"]:
            if settings.get("waits", True):
                _wait_for(watched)
            os.kill(os.getpid(), signal.SIGKILL)

    if "kill_after" in settings:
        manager.register("on_step_end", die)
    pretrain(small_config(settings), callbacks=manager)
    Path("ended.json").write_text(json.dumps({"ended": True}))


def _wait_for(trackers: list[Watched]) -> None:
    """Until they get no more points, and have had the time to write them: what no kill takes from them."""
    deadline, before, seen = time.monotonic() + PATIENCE, [-1], 0
    while seen < 4:
        counts = [tracker.num_points for tracker in trackers]
        seen = seen + 1 if counts == before and all(tracker.is_open for tracker in trackers) else 0
        assert time.monotonic() < deadline, counts
        before = counts
        time.sleep(0.6)
