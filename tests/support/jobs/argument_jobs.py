"""What each rank of the test of every argument runs: a short training, and what reached torch from its arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from onstep import Trainer
from tests.support.observed_runs import arguments
from tests.support.small_models import Regression, regression_rows

WRAPPER = torch.nn.parallel.DistributedDataParallel


def job_arguments(settings: dict[str, Any]) -> dict[str, Any]:
    """Train with these arguments; the options of the wrapper, of the process group, and the losses."""
    passed: dict[str, Any] = {}
    wrap, start = WRAPPER.__init__, dist.init_process_group

    def noted_wrap(self: Any, *args: Any, **options: Any) -> None:
        passed.update(options)
        wrap(self, *args, **options)

    def noted_start(backend: Any = None, *args: Any, **options: Any) -> None:
        passed.update(backend=str(backend), ddp_timeout=options["timeout"].total_seconds())
        start(backend, *args, **options)

    WRAPPER.__init__ = noted_wrap
    dist.init_process_group = noted_start
    args = arguments(Path("run"), **settings)
    rows = regression_rows(12)
    trainer = Trainer(Regression(), args, train_dataset=rows, eval_dataset=rows[:6])
    trainer.train()
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    names = ("backend", "ddp_timeout", "find_unused_parameters", "bucket_cap_mb", "broadcast_buffers", "static_graph")
    return {"losses": losses, **{name: passed.get(name) for name in names}}
