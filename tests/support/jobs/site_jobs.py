"""What each rank of a DiLoCo worker runs whose model or updates are divided: `job_*(settings)`."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from onstep import Trainer, TrainerCallback
from onstep.callbacks import DiLoCoCallback
from onstep.diloco.worker import DiLoCoWorker
from onstep.distributed.shards import whole
from tests.support.small_models import VOCABULARY, TokenModel, arguments

RANK, SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
BATCH = 12
"""Samples of a worker's step, on any number of ranks."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "ddp": {},
    "fsdp2": {"parallel.data_parallel_shard_size": -1, "fsdp.wrap": ["Linear"]},
    "distopt": dict.fromkeys(
        ("ddp.use_distributed_optimizer", "ddp.overlap_grad_reduce", "ddp.overlap_param_gather"), True
    ),
}


def rows(count: int, length: int = 5) -> list[dict[str, Tensor]]:
    """Tokens with a label each."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(VOCABULARY, (count, length + 1), generator=generator)
    return [{"input_ids": one[:-1], "labels": one[1:]} for one in tokens]


class Life(TrainerCallback):
    """Notes what the worker holds before each update, and dies at the beginning of a step."""

    ranks = "all"

    def __init__(self, worker: DiLoCoCallback, settings: dict[str, Any]) -> None:
        self._worker, self._settings = worker, settings
        self.held: list[dict[str, int]] = []
        """Bytes of each kind of tensor."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        Path(f"joined-{self._settings['id']}-{RANK}").touch()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._settings.get("dies_at") and RANK == SIZE - 1:
            while not list(Path(self._settings["directory"]).glob(f"**/checkpoint-{state.global_step}")):
                time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGKILL)

    @torch.no_grad()
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        worker = self._worker.worker
        if worker is not None and worker._synchronizer is not None:
            self.held.append(held(worker._synchronizer.holdings))


def held(holdings: Any) -> dict[str, int]:
    """The bytes of what a rank has of a worker's fragments, by kind."""
    kinds = {
        "base": [one.base for one in holdings.fragments],
        "submitted": [one.submitted for one in holdings.fragments],
        "residuals": [holdings.feedback.residuals],
        "before": [holdings.feedback.before],
    }
    return {kind: sum(_nbytes(one) for group in groups for one in group.values()) for kind, groups in kinds.items()}


def _nbytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def job_site(settings: dict[str, Any]) -> dict[str, Any]:
    """Trains as a worker; returns the parameters at the end, and what this rank held at each step."""
    os.environ["DILOCO_TOKEN"] = "secret"
    os.environ["ONSTEP_DILOCO_WORK"] = "work"
    overrides = {"run.save_weights": False, **LAYOUTS[settings["layout"]]}
    args = arguments(
        Path(settings["directory"]),
        max_steps=settings["steps"],
        learning_rate=0.05,
        per_device_train_batch_size=BATCH // SIZE,
        save_steps=3,
        config_overrides=overrides,
    )
    callback = DiLoCoCallback(settings["server"], worker_id=settings["id"], timeout=60)
    life = Life(callback, settings)
    trainer = Trainer(
        TokenModel(seed=4, dtype=torch.float64),
        args,
        train_dataset=rows(2 * BATCH * settings["steps"]),
        callbacks=[callback, life],
        default_callbacks=False,
    )
    trainer.train(resume_from_checkpoint=settings.get("resume", False))
    assert trainer.model is not None
    parameters = {name: whole(one.detach()).tolist() for name, one in trainer.model.named_parameters()}
    return {"parameters": parameters, "held": life.held}


@torch.no_grad()
def job_poisoned(settings: dict[str, Any]) -> dict[str, Any]:
    """Submits twice, then with a NaN in the last rank's shard; returns the error, and whether residuals are left."""
    dist.init_process_group("gloo")
    model: Any = fully_shard(TokenModel(seed=4), mesh=init_device_mesh("cpu", (SIZE,)))
    worker = DiLoCoWorker(model, None, settings["server"], worker_id="w", auth_token="secret", timeout=20)
    worker.start()
    parts = [one.to_local() for one in model.parameters()]
    for _ in range(2):
        for part in parts:
            part.add_(torch.linspace(0, 1e-3, part.numel()).view_as(part))
        worker.end_step()
    assert worker._synchronizer is not None
    residuals = worker._synchronizer.holdings.feedback.residuals
    before = {name: one.clone() for name, one in residuals.items()}
    parts[0][-1] = torch.nan if RANK == SIZE - 1 else 0.0
    raised = ""
    try:
        worker.end_step()
    except Exception as error:  # noqa: BLE001 - the test looks at it
        raised = f"{type(error).__name__}: {error}"
    worker.stop(merge=False)
    dist.destroy_process_group()
    are_kept = residuals.keys() == before.keys() and all(torch.equal(residuals[one], before[one]) for one in before)
    return {"raised": raised, "kept": bool(before) and are_kept}
