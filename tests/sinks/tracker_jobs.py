"""What the processes of the trackers' tests run: small real trainings, killed where their settings say."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sink_jobs import small_config

from onstep import CallbackManager, JsonLogger, pretrain
from onstep.callbacks.metric_sinks import MetricSinks
from onstep.trackers import MetricSink, RunIdentity, make_sink


class Watched:
    """A tracker that counts the points it was given."""

    def __init__(self, sink: MetricSink) -> None:
        self.sink, self.name, self.takes_back, self.keeps_names = sink, sink.name, False, sink.keeps_names
        self.num_points = 0

    def open(self, run: RunIdentity, state: Mapping[str, Any]) -> None:
        self.sink.open(run, state)

    def log(self, metrics: Mapping[str, float], step: int, timestamp: float) -> None:
        self.sink.log(metrics, step, timestamp)
        self.num_points += 1

    def text(self, tag: str, text: str, step: int) -> None:
        self.sink.text(tag, text, step)

    def state_dict(self) -> dict[str, Any]:
        return self.sink.state_dict()

    def close(self, status: str) -> None:
        self.sink.close(status)


def job_train(settings: dict[str, Any]) -> None:
    """Train with the trackers of `sinks`; be killed after step `kill_after`, with `waits` once they have all points."""
    manager = CallbackManager()
    watched = [Watched(make_sink(name)) for name in settings["sinks"]]
    sinks = MetricSinks(watched)
    manager.add([JsonLogger(), sinks])

    def die(context: Any) -> None:
        if context.trainer_state.global_step == settings["kill_after"]:
            if settings.get("waits", True):
                _wait_for(watched)
            os.kill(os.getpid(), signal.SIGKILL)

    if "kill_after" in settings:
        manager.register("on_step_end", die)
    pretrain(small_config(settings), callbacks=manager)
    Path("ended.json").write_text(json.dumps({"dropped": sinks.dropped}))


def _wait_for(sinks: list[Watched]) -> None:
    """Until all were given the same points, and have had the time to write them: what no kill takes from them."""
    deadline = time.monotonic() + 60
    before: set[int] = set()
    while True:
        counts = {sink.num_points for sink in sinks}
        if len(counts) == 1 and counts == before and 0 not in counts:
            return
        assert time.monotonic() < deadline, counts
        before = counts
        time.sleep(0.8)
