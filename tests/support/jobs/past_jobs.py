"""What the processes of the tests of `onstep.rewind` run: `job_*(settings)`."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import onstep
from onstep import Callback, CallbackContext, pretrain
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


def job_killed(settings: dict[str, Any]) -> None:
    """Rewind a run in a process that is killed on the way."""
    with onstep.rewind(settings["run"], settings["step"], callbacks=[KillsItself()]):
        raise AssertionError("not killed")
