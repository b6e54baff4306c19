"""One function a framework: trains a workload's model for the clock's steps, quiet or as that framework's users do.

All of them train with `torch.optim.AdamW(fused=True)` on the same batch, which lies in memory, in one process on the
CPU, and neither evaluate nor save. Quiet rows do nothing else. Comparable rows do what Onstep does by default: they
clip the gradient norm at 1, let the learning rate fall linearly, show progress and log the loss every 10 steps. Loops
that take any iterator are given the batch by `itertools.repeat`; the `Trainer`s of Onstep and Hugging Face read a
dataset of ready batches, which is their only way.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from onstep import Callback, CallbackManager, TrainerCallback
from onstep import Trainer as OnstepTrainer
from onstep import TrainingArguments as OnstepArguments
from onstep.callbacks import DefaultMetrics, InfoCallback, ProgressCallback
from onstep.config import ConfigContainer
from onstep.optim import wrap_optimizer
from onstep.training import GlobalState, train
from onstep.training.setup.setup import scheduler_for
from peer_models import Clock, Workload

LR, CLIP, LOG_INTERVAL = 1e-3, 1.0, 10

Row = Callable[[Workload, Clock, str], None]
"""Trains a new model of the workload for `clock.run_steps` steps; the text is an empty directory."""


class ReadyBatches(torch.utils.data.Dataset[Any]):
    """A dataset whose samples are whole batches: the same one, as often as there are steps."""

    def __init__(self, batch: dict[str, Tensor], size: int) -> None:
        self.batch, self.size = batch, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.batch


class RepeatedBatch:
    """An iterable with a length, for frameworks that want both."""

    def __init__(self, batch: dict[str, Tensor], size: int) -> None:
        self.batch, self.size = batch, size

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Any:
        return repeat(self.batch, self.size)


def first(samples: Sequence[Any]) -> Any:
    """The collator of ready batches."""
    return samples[0]


def made(workload: Workload, clock: Clock) -> tuple[nn.Module, torch.optim.AdamW]:
    """A new model and its optimizer."""
    torch.manual_seed(1)
    model = workload.make_model(clock).train()
    return model, torch.optim.AdamW(model.parameters(), lr=LR, fused=True)


def falling(optimizer: torch.optim.Optimizer, steps: int) -> LambdaLR:
    """The linear schedule, as `transformers` makes it."""
    return LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps))


def bare(workload: Workload, clock: Clock, directory: str) -> None:
    """PyTorch, and nothing that is not needed."""
    model, optimizer = made(workload, clock)
    batch = workload.batch
    for _ in range(clock.run_steps):
        loss = model(**batch)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def bare_clipping(workload: Workload, clock: Clock, directory: str) -> None:
    """PyTorch with clipping and a schedule."""
    model, optimizer = made(workload, clock)
    scheduler = falling(optimizer, clock.run_steps)
    batch, parameters = workload.batch, list(model.parameters())
    for _ in range(clock.run_steps):
        loss = model(**batch)["loss"]
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


class StepCounter(Callback):
    """What a user of `train()` may write."""

    steps = 0

    def on_step_end(self, context: Any) -> None:
        """Count."""
        self.steps += 1


class TrainerStepCounter(TrainerCallback):
    """What a user of `Trainer` may write, in Hugging Face's convention."""

    steps = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count."""
        self.steps += 1


def as_mean(loss: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss function of a forward step that gives a mean."""
    return loss, {}


def forward_step(data_iterator: Any, model: nn.Module) -> Any:
    """A forward step as users write it."""
    return model(**next(data_iterator))["loss"], as_mean


def no_callbacks() -> list[Any]:
    """Nobody listens."""
    return []


def default_callbacks() -> list[Any]:
    """The callbacks of both doors, with rows instead of a bar."""
    return [DefaultMetrics(), ProgressCallback(use_tqdm=False, output_stream=io.StringIO()), InfoCallback()]


def five(callback: type[Any]) -> list[Any]:
    """Five instances."""
    return [callback() for _ in range(5)]


def onstep_train(
    workload: Workload,
    clock: Clock,
    directory: str,
    *,
    clips: bool = False,
    logs: bool = False,
    callbacks: Callable[[], list[Any]] = no_callbacks,
) -> None:
    """`onstep.training.train()` with an iterator."""
    model, optimizer = made(workload, clock)
    config = ConfigContainer()
    config.train.micro_batch_size = config.train.global_batch_size = workload.num_samples
    config.train.train_iters = clock.run_steps
    config.optimizer.lr, config.optimizer.clip_grad = LR, CLIP if clips else 0.0
    config.scheduler.lr_decay_style = "linear"
    config.validation.eval_iters = 0
    config.logger.log_interval = LOG_INTERVAL if logs else 0
    wrapped = wrap_optimizer(optimizer, config.optimizer.clip_grad)
    scheduler = scheduler_for(config, wrapped, clock.run_steps) if clips else None
    manager = CallbackManager()
    manager.add(callbacks())
    state, batches = GlobalState(config), repeat(workload.batch)
    train(forward_step, [model], wrapped, scheduler, batches, None, state, callback_manager=manager)


def onstep_trainer(
    workload: Workload,
    clock: Clock,
    directory: str,
    *,
    clips: bool = False,
    logs: bool = False,
    callbacks: Callable[[], list[Any]] = no_callbacks,
) -> None:
    """`onstep.Trainer`."""
    model, optimizer = made(workload, clock)
    arguments = OnstepArguments(**trainer_arguments(clock, directory, clips=clips, logs=logs))
    data = ReadyBatches(workload.batch, clock.run_steps)
    OnstepTrainer(
        model,
        arguments,
        data_collator=first,
        train_dataset=data,
        callbacks=callbacks(),
        optimizers=(optimizer, None),
        default_callbacks=logs,
    ).train()


def hugging_face(workload: Workload, clock: Clock, directory: str, *, clips: bool = False) -> None:
    """Hugging Face's `Trainer`."""
    from transformers import Trainer, TrainingArguments
    from transformers.trainer_callback import PrinterCallback

    model, optimizer = made(workload, clock)
    arguments = TrainingArguments(**trainer_arguments(clock, directory, clips=clips, logs=clips), use_cpu=True)
    data = ReadyBatches(workload.batch, clock.run_steps)
    trainer = Trainer(
        model=model, args=arguments, data_collator=first, train_dataset=data, optimizers=(optimizer, None)
    )
    if not clips:
        trainer.remove_callback(PrinterCallback)
    trainer.train()


def trainer_arguments(clock: Clock, directory: str, *, clips: bool, logs: bool) -> dict[str, Any]:
    """What both classes named `TrainingArguments` are given."""
    return {
        "output_dir": directory,
        "max_steps": clock.run_steps,
        "per_device_train_batch_size": 1,
        "learning_rate": LR,
        "lr_scheduler_type": "linear" if clips else "constant",
        "max_grad_norm": CLIP if clips else 0.0,
        "logging_strategy": "steps" if logs else "no",
        "logging_steps": LOG_INTERVAL,
        "disable_tqdm": not logs,
        "save_strategy": "no",
        "report_to": "none",
        "remove_unused_columns": False,
    }


def lightning(workload: Workload, clock: Clock, directory: str, *, clips: bool = False) -> None:
    """Lightning's `Trainer`; the quiet row is its `barebones` mode."""
    import lightning.pytorch as pl
    from lightning.pytorch.loggers import CSVLogger

    model, optimizer = made(workload, clock)

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            loss: Tensor = self.model(**batch)["loss"]
            if clips:
                self.log("loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> Any:
            if not clips:
                return optimizer
            schedule = {"scheduler": falling(optimizer, clock.run_steps), "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": schedule}

    options: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "max_steps": clock.run_steps}
    if clips:
        options |= {"gradient_clip_val": CLIP, "log_every_n_steps": LOG_INTERVAL, "logger": CSVLogger(directory)}
        options |= {"enable_checkpointing": False, "enable_model_summary": False, "default_root_dir": directory}
    else:
        options |= {"barebones": True}
    pl.Trainer(**options).fit(Module(), RepeatedBatch(workload.batch, clock.run_steps))


def fabric(workload: Workload, clock: Clock, directory: str, *, clips: bool = False) -> None:
    """Lightning Fabric; the user writes the loop."""
    from lightning.fabric import Fabric

    plain, plain_optimizer = made(workload, clock)
    device = Fabric(accelerator="cpu", devices=1)
    model, optimizer = device.setup(plain, plain_optimizer)
    scheduler = falling(plain_optimizer, clock.run_steps)
    batch = workload.batch
    for step in range(1, clock.run_steps + 1):
        loss = model(**batch)["loss"]
        device.backward(loss)
        if clips:
            device.clip_gradients(model, optimizer, max_norm=CLIP)
        optimizer.step()
        optimizer.zero_grad()
        if clips:
            scheduler.step()
            print_every_10(step, loss)


def accelerate(workload: Workload, clock: Clock, directory: str, *, clips: bool = False) -> None:
    """Hugging Face Accelerate; the user writes the loop."""
    from accelerate import Accelerator

    plain, plain_optimizer = made(workload, clock)
    accelerator = Accelerator(cpu=True)
    schedule = falling(plain_optimizer, clock.run_steps)
    model, optimizer, scheduler = accelerator.prepare(plain, plain_optimizer, schedule)
    batch = workload.batch
    for step in range(1, clock.run_steps + 1):
        loss = model(**batch)["loss"]
        accelerator.backward(loss)
        if clips:
            accelerator.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        if clips:
            scheduler.step()
            print_every_10(step, loss)


def ignite(workload: Workload, clock: Clock, directory: str, *, clips: bool = False) -> None:
    """PyTorch-Ignite's `Engine`; the user writes the step."""
    from ignite.engine import Engine, Events
    from ignite.handlers import ProgressBar

    model, optimizer = made(workload, clock)
    scheduler, parameters = falling(optimizer, clock.run_steps), list(model.parameters())

    def update(engine: Any, batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = model(**batch)["loss"]
        loss.backward()  # type: ignore[no-untyped-call]
        if clips:
            nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    engine = Engine(update)
    if clips:
        engine.add_event_handler(Events.ITERATION_COMPLETED, lambda: scheduler.step())
        every = Events.ITERATION_COMPLETED(every=LOG_INTERVAL)
        engine.add_event_handler(every, lambda: print_every_10(engine.state.iteration, engine.state.output))
        ProgressBar().attach(engine, event_name=every)
    engine.run(repeat(workload.batch), max_epochs=1, epoch_length=clock.run_steps)


def print_every_10(step: int, loss: Tensor) -> None:
    """What users log where they write the loop."""
    if step % LOG_INTERVAL == 0:
        print(f"step {step}: loss {loss.item():.4f}")


BARE, BARE_CLIPPING = "bare PyTorch", "bare PyTorch, clip + schedule"

QUIET: dict[str, Row] = {
    BARE: bare,
    "onstep train(), quiet": onstep_train,
    "onstep train(), five callbacks": partial(onstep_train, callbacks=partial(five, StepCounter)),
    "onstep Trainer, quiet": onstep_trainer,
    "onstep Trainer, five callbacks": partial(onstep_trainer, callbacks=partial(five, TrainerStepCounter)),
    "Hugging Face Trainer, quiet": hugging_face,
    "Lightning Trainer, quiet": lightning,
    "Lightning Fabric, quiet": fabric,
    "Accelerate, quiet": accelerate,
    "Ignite, quiet": ignite,
}
"""Rows that neither clip nor change the learning rate, by name; they are compared with `BARE`."""

COMPARABLE: dict[str, Row] = {
    BARE_CLIPPING: bare_clipping,
    "onstep train(), clip + schedule": partial(onstep_train, clips=True),
    "onstep train(), defaults": partial(onstep_train, clips=True, logs=True, callbacks=default_callbacks),
    "onstep Trainer, clip + schedule": partial(onstep_trainer, clips=True),
    "onstep Trainer, defaults": partial(onstep_trainer, clips=True, logs=True),
    "Hugging Face Trainer, comparable": partial(hugging_face, clips=True),
    "Lightning Trainer, comparable": partial(lightning, clips=True),
    "Lightning Fabric, comparable": partial(fabric, clips=True),
    "Accelerate, comparable": partial(accelerate, clips=True),
    "Ignite, comparable": partial(ignite, clips=True),
}
"""Rows that clip and have a schedule, by name; they are compared with `BARE_CLIPPING`."""
