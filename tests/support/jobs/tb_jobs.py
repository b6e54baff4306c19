"""What the processes of the tests of TensorBoard files after kills run: `job_train(settings)`."""

from __future__ import annotations

from typing import Any

import torch

from onstep import TrainerCallback, pretrain
from onstep.callbacks.resumable_summary_writer import ResumableSummaryWriter
from onstep.callbacks.tb_logger import TBLogger
from tests.support.jobs.resume_jobs import observed, small_config


class Extras(TrainerCallback):
    """Writes what TBLogger does not, and never flushes."""

    ranks = "main"

    def __init__(self, writer: Any) -> None:
        self.writer = writer

    def on_log_step(self, args: Any, state: Any, control: Any, logs: Any, **kwargs: Any) -> None:
        self.writer.add_scalars("parts", {"a": 1.0, "b": 2.0}, state.global_step)
        self.writer.add_histogram("weights", torch.ones(3), state.global_step)


def job_train(settings: dict[str, Any]) -> None:
    """10 steps, all logged, evaluated every 2 and saved every 4; `own_dirs` gives each attempt its own `log_dir`."""
    config = small_config(settings)
    config.train.train_iters, config.logger.log_interval = 10, 1
    config.validation.eval_interval, config.checkpoint.save_interval = 2, 4
    writer = ResumableSummaryWriter(f"tb-{settings['attempt']}" if settings["own_dirs"] else "tb")
    logger, extras = TBLogger(writer, experiment_info={"attempt": settings["attempt"]}), Extras(writer)
    manager, _ = observed(settings)
    manager.add([writer, logger, extras] if settings["writer_first"] else [extras, logger, writer])
    pretrain(config, callbacks=manager)
