"""What the processes of the tests of LightningTrainer run: `job_train(settings)`."""

from __future__ import annotations

import logging
import os
import signal
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, Subset

from onstep import TrainingArguments
from onstep.integrations.lightning import LightningModule, LightningTrainer
from tests.support.lightning_modules import loaders, net_of


class Killed(net_of(LightningModule)):  # type: ignore[misc]
    """Kills its process at the step in `KILLS_AT`, logs in hooks, and keeps a number beside its weights."""

    seen = 0
    trained: ClassVar[list[int]] = []
    """The steps of this process."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen += 1
        self.trained.append(self.global_step)
        self.log("outputs", outputs["loss"], on_step=True, on_epoch=True, reduce_fx="max")
        die_at(self.global_step)

    def on_train_epoch_end(self) -> None:
        self.log("seen", float(self.seen))
        self.log("val_loss_seen", self.trainer.callback_metrics["val_loss"])

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = self.seen

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = checkpoint["seen"]


def die_at(step: int) -> None:
    """Kill this process at the step that its environment names: nothing of the run itself differs."""
    if os.environ.get("KILLS_AT") == str(step):
        os.kill(os.getpid(), signal.SIGKILL)


def job_train(settings: dict[str, Any]) -> dict[str, Any]:
    """Train; returns the weights, the record without times, and the first step that this process trained."""
    os.environ["KILLS_AT"] = str(settings.get("kills_at"))
    torch.manual_seed(1)
    module = Killed(settings["schedule"], dropout=settings.get("dropout", 0.2))
    train, validation = loaders(shuffles=settings.get("shuffles", True), batch=settings.get("batch", 4))
    args = TrainingArguments(
        "run",
        num_train_epochs=3,
        eval_strategy="epoch",
        logging_steps=2,
        save_steps=1,
        gradient_accumulation_steps=settings.get("accumulates", 1),
        max_grad_norm=0,
        use_cpu=True,
    )
    trainer = LightningTrainer(module, args, train, validation, default_callbacks=False)
    trainer.train()
    rank = dist.get_rank() if dist.is_initialized() else 0
    return {"weights": weights(module), "log": records(trainer), "rank": rank, "first": module.trained[0]}


def weights(module: torch.nn.Module) -> list[float]:
    """All values of all parameters."""
    return [value for parameter in module.parameters() for value in parameter.detach().flatten().tolist()]


def records(trainer: LightningTrainer) -> list[dict[str, Any]]:
    """The log history without what depends on the machine."""
    timed = ("runtime", "per_second", "samples")
    return [{k: v for k, v in one.items() if not k.endswith(timed)} for one in trainer.state.log_history]


def job_beside(settings: dict[str, Any]) -> dict[str, Any]:
    """Train the same real LightningModule by Lightning's Trainer or by ours; the weights and the last metrics."""
    import lightning

    logging.getLogger("lightning.pytorch").setLevel("ERROR")
    torch.manual_seed(1)
    module = measured(net_of(lightning.LightningModule))(settings["schedule"])
    (train, validation), ranks = loaders(), settings["ranks"]
    if ranks > 1:
        sampler: Any = DistributedSampler(train.dataset, ranks, int(os.environ["RANK"]), seed=3)  # type: ignore[arg-type]
        train = DataLoader(train.dataset, batch_size=4, sampler=sampler)
        validation = DataLoader(Subset(validation.dataset, range(16)), batch_size=4)
    accumulates, clip = settings.get("accumulates", 1), settings.get("clip")
    if settings["door"] == "lightning":
        theirs = lightning.Trainer(
            max_epochs=4,
            accelerator="cpu",
            devices=ranks,
            strategy="ddp" if ranks > 1 else "auto",
            accumulate_grad_batches=accumulates,
            gradient_clip_val=clip,
            num_sanity_val_steps=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        theirs.fit(module, train, validation)
        metrics = theirs.callback_metrics
    else:
        args = TrainingArguments(
            "run",
            num_train_epochs=4,
            eval_strategy="epoch",
            gradient_accumulation_steps=accumulates,
            max_grad_norm=clip or 0,
            save_strategy="no",
            use_cpu=True,
        )
        ours = LightningTrainer(module, args, train, validation, default_callbacks=False)
        ours.train()
        metrics = ours.attached.callback_metrics
    return {"weights": weights(module), "metrics": {name: float(value) for name, value in metrics.items()}}


def measured(net: Any) -> Any:
    """The module with an object of torchmetrics that is logged."""
    import torchmetrics

    class Measured(net):
        def __init__(self, schedule: str) -> None:
            super().__init__(schedule)
            self.error = torchmetrics.MeanAbsoluteError()

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            x, y = batch
            self.error(self.layers(x).squeeze(-1), y)
            self.log("error", self.error, on_step=True, on_epoch=True)

    return Measured


def job_resumed(settings: dict[str, Any]) -> dict[str, Any]:
    """Train a real LightningModule with an object of torchmetrics, saving each step; killed where asked."""
    import lightning

    os.environ["KILLS_AT"] = str(settings.get("kills_at"))
    trained: list[int] = []

    class Dies(measured(net_of(lightning.LightningModule))):  # type: ignore[misc]
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            trained.append(self.global_step)
            die_at(self.global_step)

    torch.manual_seed(1)
    module = Dies("two")
    args = TrainingArguments("run", num_train_epochs=2, eval_strategy="epoch", save_steps=1, use_cpu=True)
    trainer = LightningTrainer(module, args, *loaders(shuffles=True), default_callbacks=False)
    trainer.train()
    return {"weights": weights(module), "log": records(trainer), "first": trained[0]}
