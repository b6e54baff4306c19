"""Calls the hooks of a module at the events of a run, and keeps with each checkpoint where they are."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from torch import nn

from onstep.distributed import World
from onstep.events import Control, TrainerCallback
from onstep.integrations.lightning.attached import Progress
from onstep.integrations.lightning.definitions import CALLED, is_defined
from onstep.integrations.lightning.loaders import Loaders
from onstep.integrations.lightning.logged import Logged, Phase, add_to_record
from onstep.integrations.lightning.optimizers import Schedules
from onstep.record.kinds import Metrics
from onstep.train_state import StateDict
from onstep.trainer import Trainer
from onstep.training import GlobalState


class ModuleHooks(TrainerCallback):
    """Calls a module's hooks; the callback of every `LightningTrainer`."""

    state_key = "module"

    def __init__(self, module: nn.Module, loaders: Loaders, logged: Logged, progress: Progress) -> None:
        self.defined = {name: getattr(module, name) for name in CALLED if is_defined(module, name)}
        """The hooks that the module defines."""
        self.schedules: Schedules | None = None
        self._loaders, self._logged, self._progress = loaders, logged, progress
        self._kept: StateDict | None = None
        """What `on_save_checkpoint` gave to the checkpoint that was loaded, until the training begins."""
        self._has_begun = False
        self._ended: tuple[Any, ...] | None = None
        """The last micro-batch of a step, whose `on_train_batch_end` waits for the update."""

    def call(self, name: str, *args: object) -> Any:
        """Call a hook, if the module defines it."""
        hook = self.defined.get(name)
        if hook is None:
            return None
        with self._logged.within(name):
            return hook(*args)

    def call_at_end(self, name: str, phase: Phase, world: World) -> None:
        """Call the hook at the end of an epoch, which finds its values in `trainer.callback_metrics`. Collective."""
        if name in self.defined:
            self._logged.update_metrics(phase, world)
            self.call(name)

    def step_scheduler(self, scheduler: Any, value: object) -> None:
        """Step a scheduler as the module does, if it defines `lr_scheduler_step`."""
        if "lr_scheduler_step" in self.defined:
            self.call("lr_scheduler_step", scheduler, value)
        elif value is None:
            scheduler.step()
        else:
            scheduler.step(value)

    def end_batch(self, outputs: object, batch: object, *, is_last: bool) -> None:
        """After the backward pass of a micro-batch; the last one of a step ends after the update."""
        index = self._progress.batches
        self._progress.batches += 1
        if "on_train_batch_end" not in self.defined:
            return
        if is_last:
            self._ended = outputs, batch, index
        else:
            self.call("on_train_batch_end", outputs, batch, index)

    def on_train_begin(self, args: object, state: object, control: object, **kwargs: Any) -> None:
        """`on_fit_start` and `on_train_start`."""
        self._has_begun = True
        self.call("on_fit_start")
        self.call("on_train_start")

    def on_epoch_begin(self, args: object, state: object, control: object, **kwargs: Any) -> None:
        """`on_train_epoch_start`, also where a run continues in the middle of an epoch."""
        self.finish_waiting(kwargs["trainer"])
        self.call("on_train_epoch_start")

    def on_step_begin(self, args: object, state: object, control: object, **kwargs: Any) -> None:
        """A step begins to log."""
        self._logged.of_step.clear()

    def on_step_end(self, args: object, state: object, control: Control, **kwargs: Any) -> None:
        """`on_train_batch_end` of the last micro-batch; the schedulers of steps that follow a metric."""
        if self._ended is not None:
            ended, self._ended = self._ended, None
            with self._logged.batch(ended[1], is_filler=False):
                self.call("on_train_batch_end", *ended)
        if self.schedules is not None and self.schedules.follows:
            self._await("step", control, kwargs["trainer"])

    def on_log_step(self, args: object, state: object, control: object, logs: Metrics, **kwargs: Any) -> None:
        """Add what the step has logged. Collective."""
        add_to_record(logs, self._logged.step_values(_run_of(kwargs["trainer"]).world))

    def on_epoch_end(self, args: object, state: object, control: Control, **kwargs: Any) -> None:
        """Step the schedulers of epochs; `on_train_epoch_end`, once the evaluation that is due is over."""
        if self.schedules is not None:
            self.schedules.advance("epoch", follows=False)
        self._await("epoch", control, kwargs["trainer"])

    def on_train_end(self, args: object, state: object, control: object, **kwargs: Any) -> None:
        """`on_train_end` and `on_fit_end`."""
        self.finish_waiting(kwargs["trainer"])
        self.call("on_train_end")
        self.call("on_fit_end")
        self._has_begun = False

    def _await(self, what: str, control: Control, trainer: Trainer) -> None:
        self._progress.awaits = what
        if not (control.should_evaluate and self._loaders.can_validate):
            self.finish_waiting(trainer)

    def finish_waiting(self, trainer: Trainer) -> None:
        """Do what comes after the evaluation of a step or an epoch. Collective."""
        what, self._progress.awaits = self._progress.awaits, ""
        if what == "epoch":
            self.call_at_end("on_train_epoch_end", "training", _run_of(trainer).world)
            values = self._logged.epoch_values("training", _run_of(trainer).world)
            if values:
                logs: Metrics = {}
                add_to_record(logs, values)
                trainer.log(logs)
        if what and self.schedules is not None:
            self.schedules.advance(what, follows=True)
        if what == "epoch":
            self._progress.epoch, self._progress.batches = self._progress.epoch + 1, 0

    def state_dict(self) -> StateDict:
        """The progress, what the epoch has logged, and what the module and the data module save themselves."""
        kept: StateDict = {} if self._kept is None else self._kept
        if self._has_begun:
            kept = {}
            self.call("on_save_checkpoint", kept)
        data = self._loaders.datamodule
        own = data.state_dict() if data is not None and is_defined(data, "state_dict") else {}
        return {**asdict(self._progress), "logged": self._logged.state_dict(), "module": kept, "datamodule": own}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue from there."""
        for name in asdict(self._progress):
            setattr(self._progress, name, state_dict[name])
        self._logged.load_state_dict(state_dict["logged"])
        self._kept = state_dict["module"]
        self.call("on_load_checkpoint", dict(self._kept))
        data = self._loaders.datamodule
        if data is not None and is_defined(data, "load_state_dict"):
            data.load_state_dict(state_dict["datamodule"])


def _run_of(trainer: Trainer) -> GlobalState:
    run = trainer.global_state
    assert run is not None
    return run
