"""What the processes of the storm over the trackers run: `job_pretrain(settings)` and `job_trainer(settings)`.

All trackers and all files that show numbers are there: the record, `trainer_logs.json`, the norm files, TBLogger's
directory, csv, TensorBoard and services.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from onstep import Callback, JsonLogger, Trainer, TrainingArguments, pretrain
from onstep.callbacks import (
    GradNormLogger,
    ParameterNormLogger,
    ResumableSummaryWriter,
    TBLogger,
    TrackersCallback,
    WeightNormLogger,
)
from onstep.checkpoint import checkpoints
from onstep.training.runs.run_dir import RunDir
from tests.support.faults.tracker_services import BufferingTracker, SocketTracker
from tests.support.jobs.killed_tracker_jobs import small_config
from tests.support.small_models import Regression, regression_rows

STEPS = 42
FILES = ("csv", "tensorboard")
SERVICES = ("healthy", "hanging", "absent", "forgetful", "buffering")


class Sends(Callback):
    """Adds what only user code has: points and texts for one tracker, and samples; each step takes a moment."""

    ranks = "main"

    def __init__(self, trackers: TrackersCallback) -> None:
        self._trackers = trackers

    def on_step_end(self, context: Any) -> None:
        step = context.trainer_state.global_step
        time.sleep(0.01)
        if step % 3 == 0:
            logger = self._trackers.tag_loggers["healthy"]
            logger.log_metrics({"mine/square": step * step}, step)
            logger.log_metrics({"mine/cube": step**3}, step)
            logger.add_text("mine", f"at {step}", step)
        if step % 7 == 0:
            context.trainer_state.append_to_record("sample", {"prompt": "def ", "text": f"main({step})"})


def callbacks(settings: dict[str, Any]) -> list[Any]:
    sockets = Path(settings["sockets"])
    services = [
        (BufferingTracker if name == "buffering" else SocketTracker)(name, sockets / f"{name}.sock")
        for name in SERVICES
    ]
    names = {name: ["hf", "bridge"] if name == "healthy" else ["hf"] for name in SERVICES}
    trackers = TrackersCallback(services, close_timeout=settings["close_timeout"], names=names)
    files = TrackersCallback(list(FILES), names={"csv": ["hf"], "tensorboard": ["hf", "bridge"]})
    writer = ResumableSummaryWriter("tb")
    norms = [GradNormLogger(), WeightNormLogger(), ParameterNormLogger(power_iter_steps=1)]
    return [JsonLogger(), writer, TBLogger(writer), *norms, files, trackers, Sends(trackers)]


def job_pretrain(settings: dict[str, Any]) -> None:
    """A log at each step, an evaluation at each fourth, a checkpoint at each fifth."""
    _die_at_an_operation(settings)
    config = small_config(settings)
    config.train.train_iters = STEPS
    config.validation.eval_interval, config.checkpoint.save_interval = 4, 5
    config.checkpoint.certify, config.checkpoint.most_recent_k = True, -1
    config.logger.log_interval = settings.get("log_interval", 1)
    pretrain(config, callbacks=callbacks(settings))


def job_trainer(settings: dict[str, Any]) -> None:
    """The same through the other door."""
    _die_at_an_operation(settings)
    rows = regression_rows(80)
    args = TrainingArguments(
        output_dir="runs/run",
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=2,
        logging_steps=settings.get("log_interval", 1),
        save_steps=5,
        eval_strategy="steps",
        eval_steps=4,
        learning_rate=0.05,
        disable_tqdm=True,
        report_to="none",
    )
    trainer = Trainer(
        Regression(),
        args,
        train_dataset=rows,
        eval_dataset=rows,
        callbacks=callbacks(settings),
        default_callbacks=False,
    )
    root = RunDir(Path("runs/run")).checkpoints
    trainer.train(resume_from_checkpoint=root.exists() and bool(list(checkpoints(root))))
    trainer.evaluate()


def _die_at_an_operation(settings: dict[str, Any]) -> None:
    """Be killed before, within or after the n-th change of a file that the trackers and the record make."""
    if "operation" not in settings:
        return
    number, how = settings["operation"], settings["how"]
    lock, count = threading.Lock(), [0]

    def is_next() -> bool:
        with lock:
            count[0] += 1
            return count[0] == number

    def dying(real: Any, writes: bool) -> Any:
        def call(*args: Any, **keywords: Any) -> Any:
            if not is_next():
                return real(*args, **keywords)
            if how == "within" and writes:
                data = args[1]
                real(args[0], data[: len(data) // 2], *args[2:])
            elif how == "after":
                real(*args, **keywords)
            os.kill(os.getpid(), signal.SIGKILL)
            return None

        return call

    for name, writes in {"pwrite": True, "write": True, "replace": False, "ftruncate": False, "rename": False}.items():
        setattr(os, name, dying(getattr(os, name), writes))
