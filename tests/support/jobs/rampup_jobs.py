"""What the ranks of the tests of growing batches and compared weights run: `job_*(settings)`."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch

from onstep import CallbackManager, pretrain
from onstep.errors import ReplicaMismatchError
from onstep.training import get_num_microbatches
from tests.support.jobs.resume_jobs import small_config

RANK = int(os.environ.get("RANK", "0"))


def write(result: dict[str, Any]) -> None:
    Path(f"result-{RANK}.json").write_text(json.dumps(result))


def job_grow(settings: dict[str, Any]) -> None:
    """Losses, sizes and the final weights of a run whose batch grows; it dies after `dies_after` steps."""
    losses: list[float] = []
    sizes: list[list[int]] = []
    manager = CallbackManager()

    def note(context: Any) -> None:
        losses.append(context.loss_dict["lm loss"].item())
        sizes.append([get_num_microbatches(), context.state.current_global_batch_size])

    def die(context: Any) -> None:
        if context.state.train_state.step == settings["dies_after"]:
            os._exit(9)

    manager.register("on_train_step_end", note)
    if settings.get("dies_after"):
        manager.register("on_step_end", die)
    state = pretrain(small_config(settings), callbacks=manager)
    weights = hashlib.sha256(Path("runs/run/model/model.safetensors").read_bytes()).hexdigest() if RANK == 0 else None
    progress = state.train_state
    counts = [progress.step, progress.consumed_train_samples, progress.skipped_train_samples]
    write({"losses": losses, "sizes": sizes, "weights": weights, "counts": counts})


def job_tamper(settings: dict[str, Any]) -> None:
    """A run in which rank 1 changes one bit of a weight after step 3."""
    manager, reason = CallbackManager(), []

    def tamper(context: Any) -> None:
        if RANK == 1 and context.state.train_state.step == 3:
            weight = dict(context.model[0].named_parameters())["module.final_norm.weight"]
            with torch.no_grad():
                weight.view(torch.int32)[1] ^= 1

    manager.register("on_step_begin", tamper)
    manager.register("on_run_end", lambda context: reason.append(context.reason))
    error = ""
    try:
        pretrain(small_config(settings), callbacks=manager)
    except ReplicaMismatchError as mismatch:
        error = str(mismatch)
    write({"error": error, "reason": reason})
