"""What the processes of the tests of `onstep.rewind` run: `job_*(settings)`."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import onstep
from onstep import Callback, CallbackContext, pretrain
from onstep.past.view import examine
from tests.support.past_runs import run_config


class KillsItself(Callback):
    """Ends its process by SIGKILL after a repeated step."""

    def on_step_end(self, context: CallbackContext) -> None:
        """Called after each step."""
        os.kill(os.getpid(), signal.SIGKILL)


class Rewinds(Callback):
    """Stands for the callback of a test."""


def job_train(settings: dict[str, Any]) -> None:
    """Train a run of this directory."""
    pretrain(run_config(Path(settings["corpus"]), Path(settings["cache"]), Path("runs"), **settings.get("changes", {})))


def job_rewind(settings: dict[str, Any]) -> dict[str, Any]:
    """Rewind a run; what is found."""
    with onstep.rewind(settings["run"], settings["step"], callbacks=[Rewinds()]) as past:
        samples = past.samples()
        past.next()
        return {
            "summary": past.comparison.summary,
            "num_samples": len(samples),
            "indices": sorted(one.index for one in samples if one.index is not None),
            "share": sum(one.share for one in samples),
        }


def job_views(settings: dict[str, Any]) -> dict[str, Any]:
    """Train a run of this directory, and rewind it; what is seen of the step's samples and layers."""
    job_train(settings)
    logged = ["params_norm", "num_zeros", "gradient/layers.1"]
    with onstep.rewind("runs/x", settings["step"], log=logged) as past:
        view = examine(past)
        assert past.log is not None
        numbers = [[one.weight, one.gradient, one.update, one.mean_gradient, one.mean_update] for one in view.layers]
        return {
            "summary": view.comparison["summary"],
            "samples": [[one.index, one.loss, one.share] for one in view.samples],
            "gradients": [[one.grad_norm, one.grad_share] for one in view.samples],
            "layers": [
                *numbers,
                [view.clip_factor],
                *([row[name] for name in logged] for row in past.log.rows.values()),
            ],
        }


def job_killed(settings: dict[str, Any]) -> None:
    """Rewind a run in a process that is killed on the way."""
    with onstep.rewind(settings["run"], settings["step"], callbacks=[KillsItself()]):
        raise AssertionError("not killed")
