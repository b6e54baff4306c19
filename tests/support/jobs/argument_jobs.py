"""Trains on each rank, and returns what of its arguments reached torch, or which methods were called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from onstep import Trainer
from tests.support.observed_runs import arguments
from tests.support.small_models import Regression, regression_rows

WRAPPER = torch.nn.parallel.DistributedDataParallel


class Boxes(Regression):
    """Has labels that are a list, with an object for each sample."""

    def forward(self, x: Tensor, labels: Any = None) -> dict[str, Tensor]:
        return {"loss": torch.zeros(()), **super().forward(x)}


def collate(samples: list[Any]) -> dict[str, Any]:
    return {"x": torch.stack([row["x"] for row in samples]), "labels": [{"box": row["x"][None]} for row in samples]}


def objects_of_batches(settings: dict[str, Any]) -> list[int]:
    """How many objects the labels of each of two global batches have."""
    chosen = {"eval_use_gather_object": settings.get("eval_use_gather_object", False), "eval_do_concat_batches": False}
    args = arguments(Path("objects"), per_device_eval_batch_size=1, **chosen)
    output = Trainer(Boxes(), args, data_collator=collate).predict(regression_rows(4))
    return [len(labels) for labels in output.label_ids]


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
    names = ("backend", "ddp_timeout", "find_unused_parameters", "bucket_cap_mb", "static_graph")
    # torch 2.13 renamed the argument
    sync = passed.get("forward_sync_buffers", passed.get("broadcast_buffers"))
    objects = objects_of_batches(settings)
    return {"objects": objects, "losses": losses, "sync_buffers": sync, **{name: passed.get(name) for name in names}}


def job_saves(settings: dict[str, Any]) -> dict[str, int]:
    """How often this rank calls the user's methods that save, in a training that saves twice."""
    calls = {"_save": 0, "_save_checkpoint": 0}

    class Saving(Trainer):
        def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
            calls["_save"] += 1
            super()._save(output_dir, state_dict)

        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            calls["_save_checkpoint"] += 1
            super()._save_checkpoint(model, trial)

    args = arguments(Path("saves"), save_strategy="epoch", num_train_epochs=2)
    Saving(Regression(), args, train_dataset=regression_rows(12)).train()
    return calls
