"""Runs whose files are in an object store, with what strikes them."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from onstep import Callback, CallbackManager, JsonLogger, pretrain
from onstep.checkpoint import FileStore, Retention, checkpoints
from onstep.checkpoint.catalog.retention import delete_surplus
from onstep.errors import LostLeaseError, StoreError
from onstep.mirror import outage
from onstep.mirror.attach import Place, attach
from onstep.mirror.remote_checkpoints import RemoteCheckpoints
from onstep.stores.bucket import Bucket
from tests.support.jobs.resume_jobs import Takings, small_config
from tests.support.small_checkpoints import write_checkpoint
from tests.support.waiting import until


class Kill(Callback):
    """Kills its process after a step, once the store has a checkpoint of step `has`, if that is given."""

    def __init__(self, step: int, has: int | None = None) -> None:
        self._step, self._has = step, has

    def on_step_end(self, context: Any) -> None:
        if context.step == self._step:
            run = context.state.cfg.run
            remote = RemoteCheckpoints(Bucket(f"{run.output_dir}/{run.name}"))
            until(lambda: self._has in {None, *(one.step for one in remote.all() if one.is_committed)})
            os.kill(os.getpid(), signal.SIGKILL)


class Slow(Callback):
    """Takes some time for each step, and prints it."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def on_step_end(self, context: Any) -> None:
        print(f"step {context.step} is done", flush=True)
        time.sleep(self._seconds)


def job_train(settings: dict[str, Any]) -> None:
    os.environ.update(settings["environment"])
    ends_at = time.time() + settings.get("ends_in", 0.0)
    if "ends_in" in settings:  # a SLURM job, where there is no squeue
        os.environ |= {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": str(int(ends_at)), "PATH": os.getcwd()}
    config = small_config(settings)
    config.run.scratch_dir, config.run.lease_seconds = "scratch", settings.get("lease_seconds", 1.0)
    config.run.scratch_gib = settings.get("scratch_gib")
    config.checkpoint.save_interval, config.checkpoint.most_recent_k = (
        settings.get("save_interval", 2),
        settings.get("most_recent_k", 2),
    )
    if "again" in settings:
        outage.AGAIN_SECONDS = settings["again"]
    config.checkpoint.async_save = settings.get("async_save", False)
    manager = CallbackManager()
    manager.add([JsonLogger()])
    manager.register("on_train_step_end", Takings(settings["attempt"]).note)
    manager.add([Slow(settings["slow"])] if "slow" in settings else [])
    manager.add([Kill(**settings["kill"])] if "kill" in settings else [])
    try:
        pretrain(config, callbacks=manager)
    finally:
        Path("left.json").write_text(json.dumps(ends_at - time.time()))


def job_mirror(settings: dict[str, Any]) -> None:
    """Write a log and small checkpoints of the given steps, one after the other, and mirror each."""
    os.environ.update(settings["environment"])
    Path("pid").write_text(str(os.getpid()))
    directory = Path("scratch/run").absolute()
    place = Place(settings["url"], directory, Path("scratch/.mirrored").absolute(), settings.get("lease_seconds", 0.3))
    mirror = attach(place, Retention(most_recent_k=2))
    newest = max((info.step for info in checkpoints(mirror.root)), default=0)
    Path("started.json").write_text(json.dumps(newest))
    directory.mkdir(parents=True, exist_ok=True)
    log = directory / "record.jsonl"
    if log.exists():  # a run that continues cuts its logs, which may be ahead of the checkpoint
        log.write_text("".join(line for line in log.open() if int(line.split()[0]) <= newest))
    for step in range(newest + 1, settings["until"] + 1):
        (directory / "run.json").write_text(json.dumps({"step": step}))
        with log.open("a") as lines:
            lines.write(f"{step} by {os.getpid()}\n")
        content = {"model/model.safetensors": f"weights of {step} ".encode() * 50, "model/state.json": b"{}"}
        write_checkpoint(mirror.root, step, content)
        delete_surplus(FileStore(), mirror.root, Retention(most_recent_k=2), newest=step, run_id="run")
        while True:
            try:
                mirror.sync()
                break
            except LostLeaseError:
                raise
            except StoreError:
                time.sleep(0.05)
    mirror.close()
