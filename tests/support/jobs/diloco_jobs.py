"""What each rank of a DiLoCo worker with several ranks runs: `job_*(settings)`."""

from __future__ import annotations

import gc
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from onstep import CallbackManager, Trainer, TrainerCallback, pretrain
from onstep.callbacks import DiLoCoCallback
from onstep.config import apply_overrides
from onstep.diloco.worker import DiLoCoWorker
from onstep.diloco.worker.ranks import MainRankError
from onstep.distributed.shards import whole
from tests.diloco.worker.crew import batches, small_model
from tests.support.small_configs import small_pretrain_config
from tests.support.small_models import Regression, arguments, regression_rows

RANK, SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _wrapped(kind: str, model: nn.Module) -> Any:
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp2":
        return fully_shard(model, mesh=init_device_mesh("cpu", (SIZE,)))
    return model


def _worker(model: Any, optimizer: Any, settings: dict[str, Any]) -> DiLoCoWorker:
    options = {"auth_token": "secret", "worker_id": settings["id"], "timeout": 20.0, "max_sync_retries": 1}
    return DiLoCoWorker(model, optimizer, settings["server"], **options)


def job_hold(settings: dict[str, Any]) -> None:
    """Is a worker until it is killed."""
    with _worker(small_model(seed=5), None, settings):
        Path("holds").touch()
        time.sleep(3600)


def job_train(settings: dict[str, Any]) -> dict[str, Any]:
    """Trains on this rank's half of each batch, sharded or replicated; returns all parameters."""
    dist.init_process_group("gloo")
    try:
        return _train(settings)
    finally:
        gc.collect()  # a data-parallel wrapper must be gone before its group is
        dist.destroy_process_group()


def _train(settings: dict[str, Any]) -> dict[str, Any]:
    model = _wrapped(settings["kind"], small_model(seed=5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with _worker(model, optimizer, settings) as worker:
        for inputs, targets in batches(0, settings["steps"]):
            optimizer.zero_grad()
            mine = slice(RANK * 4 // SIZE, (RANK + 1) * 4 // SIZE)
            nn.functional.mse_loss(model(inputs[mine]), targets[mine]).backward()
            optimizer.step()
        step = worker.sync_metrics["diloco/local_step"], worker.sync_metrics["diloco/sync_count"]
    parameters = {name.removeprefix("module."): whole(one.detach()) for name, one in model.named_parameters()}
    return {"parameters": {name: one.tolist() for name, one in parameters.items()}, "step": step}


def job_resume(settings: dict[str, Any]) -> dict[str, Any]:
    """Trains from `state`, if there is one, of which only rank 0 has the worker's; writes it if it is to be `saved`."""
    path, data = Path(settings["state"]), batches(0, settings["steps"])[settings["start"] :]
    if SIZE > 1:
        dist.init_process_group("gloo")
    model = small_model(seed=5)
    found = torch.load(path) if path.exists() else None
    if found is not None:
        model.load_state_dict(found["model"])
    wrapped = _wrapped("ddp" if SIZE > 1 else "plain", model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    worker = _worker(wrapped, optimizer, settings)
    if found is not None and RANK == 0:
        worker.load_state_dict(found["worker"])
    worker.start()
    for inputs, targets in data:
        optimizer.zero_grad()
        mine = slice(RANK * 4 // SIZE, (RANK + 1) * 4 // SIZE)
        nn.functional.mse_loss(wrapped(inputs[mine]), targets[mine]).backward()
        optimizer.step()
    if settings["saved"]:
        torch.save({"model": model.state_dict(), "worker": worker.state_dict()}, path)
    worker.stop(merge=not settings["saved"])
    del wrapped, optimizer, worker
    gc.collect()  # a data-parallel wrapper must be gone before its group is
    if SIZE > 1:
        dist.destroy_process_group()
    return {name: one.tolist() for name, one in model.named_parameters()}


def job_chunks(settings: dict[str, Any]) -> dict[str, Any]:
    """Trains a model in two chunks whose parameters have the same names."""
    chunks = [nn.Linear(3, 5).double(), nn.Linear(5, 2).double()]
    optimizer = torch.optim.SGD([one for chunk in chunks for one in chunk.parameters()], lr=0.1)
    with _worker(chunks, optimizer, settings):
        for inputs, targets in batches(0, settings["steps"]):
            optimizer.zero_grad()
            nn.functional.mse_loss(chunks[1](torch.tanh(chunks[0](inputs))), targets).backward()
            optimizer.step()
    named = {f"{index}.{name}": one for index, chunk in enumerate(chunks) for name, one in chunk.named_parameters()}
    return {"parameters": {name: one.tolist() for name, one in named.items()}}


def job_refused(settings: dict[str, Any]) -> str:
    """Joins with another model; returns the error of this rank."""
    dist.init_process_group("gloo")
    try:
        _worker(nn.Linear(3, 7).double(), None, settings).start()
    except MainRankError as error:
        return f"follower: {error}"
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return f"main: {error}"
    finally:
        dist.destroy_process_group()
    return "no error"


def job_trainer(settings: dict[str, Any]) -> dict[str, Any]:
    """Trains with the callback in the Trainer, which uses DDP."""
    os.environ["DILOCO_TOKEN"] = "secret"
    callback = DiLoCoCallback(settings["server"], worker_id=settings["id"])
    args = arguments(Path(settings["directory"]), max_steps=6, learning_rate=0.1, per_device_train_batch_size=2)
    trainer = Trainer(
        Regression(seed=4), args, train_dataset=regression_rows(16), callbacks=[callback], default_callbacks=False
    )
    trainer.train()
    return {name: one.tolist() for name, one in trainer.model.named_parameters()}


class Rates(TrainerCallback):
    """Learning rates before each step, until it crashes."""

    def __init__(self, crash_at: int | None) -> None:
        self.rates: list[float] = []
        self._crash_at = crash_at

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any, **kwargs: Any) -> None:
        self.rates.append(float(optimizer.param_groups[0]["lr"]))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._crash_at:
            raise ArithmeticError("an error of the test")


def job_joiner(settings: dict[str, Any]) -> dict[str, Any]:
    """Trains with the callback until it crashes, or to the end; returns learning rates and the trained samples."""
    os.environ["DILOCO_TOKEN"] = "secret"
    rates = Rates(settings.get("crash_at"))
    options = {"max_steps": 18, "warmup_steps": 2, "lr_scheduler_type": "linear", "learning_rate": 0.1}
    args = arguments(
        Path(settings["directory"]), per_device_train_batch_size=4 // SIZE, save_steps=3, logging_steps=1, **options
    )
    callback = DiLoCoCallback(settings["server"], worker_id=settings["id"])
    trainer = Trainer(
        Regression(), args, train_dataset=regression_rows(16), callbacks=[callback, rates], default_callbacks=False
    )
    with suppress(ArithmeticError):
        trainer.train(resume_from_checkpoint=settings.get("resume"))
    return {"rates": rates.rates, "parameters": {name: one.tolist() for name, one in trainer.model.named_parameters()}}


def job_pretrain(settings: dict[str, Any]) -> dict[str, Any]:
    """Pretrains a small GPT, as a worker if there is a server; returns its last validation loss and what it sent."""
    os.environ["DILOCO_TOKEN"] = "secret"
    config = small_pretrain_config(settings["corpus"], settings["cache"], layers=2, width=32)
    config.train.train_iters, config.train.global_batch_size = settings["steps"], settings["batch"]
    config.validation.eval_interval, config.validation.eval_iters = settings["steps"], 10
    config.validation.eval_global_batch_size = config.validation.eval_micro_batch_size = 4
    config.logger.console = "quiet"
    apply_overrides(config, settings.get("keys", []))
    found: dict[str, Any] = {"sent": 0}
    callback = DiLoCoCallback(settings.get("server", ""), worker_id=settings.get("id"))
    manager = CallbackManager()
    manager.add(callback)
    manager.register("on_eval_end", lambda context: found.update(loss=float(context.metrics["eval_loss"])))

    def note_what_was_sent() -> None:
        if callback.worker is not None:
            found["sent"] = callback.worker.metrics.total_send_bytes

    manager.register("on_step_end", note_what_was_sent)
    with suppress(SystemExit):
        pretrain(config, callbacks=manager)
    return found
