"""`LightningTrainer`: trains a `LightningModule` with Onstep's loop."""

from __future__ import annotations

import copy
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from onstep.config import TrainingArguments
from onstep.data import Batch
from onstep.errors import ConfigError
from onstep.integrations.lightning.attached import AttachedTrainer, Progress
from onstep.integrations.lightning.definitions import arguments_for, check_callbacks, check_datamodule, check_module
from onstep.integrations.lightning.hooks import ModuleHooks
from onstep.integrations.lightning.loaders import Loaders, batch_size_of
from onstep.integrations.lightning.logged import Logged
from onstep.integrations.lightning.optimizers import Schedules, read_optimizers
from onstep.record.kinds import Metrics
from onstep.trainer import EvalLoopOutput, Trainer


class LightningTrainer(Trainer):
    """Trains a `LightningModule`, or any module with `training_step` and `configure_optimizers`.

    Args:
        module: the module; its weights are those of the checkpoints, under the same names.
        args: `onstep.TrainingArguments`; learning rate and schedule are those of `configure_optimizers`, the batch size
            is that of the loader.
        train_dataloaders: a loader; or a data module.
        val_dataloaders: a loader, or a list of several.
        datamodule: in place of loaders; without either, the module's own `train_dataloader` and `val_dataloader` count.
        callbacks: Onstep's, as of `Trainer`.

    Raises:
        ConfigError: for manual optimization, and for methods of the module that would not be called, each with what to
            do instead.
    """

    loss_is_scaled_for_ga = False

    def __init__(
        self,
        module: Any,
        args: TrainingArguments | None = None,
        train_dataloaders: object = None,
        val_dataloaders: object = None,
        datamodule: Any = None,
        callbacks: Any = None,
        *,
        default_callbacks: bool = True,
    ) -> None:
        check_callbacks(callbacks)
        self.loaders = Loaders(check_module(module), datamodule, train_dataloaders, val_dataloaders)
        self.progress, self.logged = Progress(), Logged(module)
        self.hooks = ModuleHooks(module, self.loaders, self.logged, self.progress)
        super().__init__(
            module,
            copy.copy(args),
            eval_dataset=self.loaders if self.loaders.can_validate else None,
            callbacks=callbacks,
            default_callbacks=default_callbacks,
        )
        self.attached = AttachedTrainer(self, self.loaders, self.logged, self.progress)
        self.attached.attach(module)
        if self.loaders.datamodule is not None:
            check_datamodule(self.loaders.datamodule)
            self.loaders.datamodule.trainer = self.attached
        self.add_callback(self.hooks)

    def train(self, *args: Any, **options: Any) -> Any:
        """Train; see `Trainer.train`. `setup` is called before, and `teardown` afterwards."""
        if self.args.eval_strategy != "no" and not self.loaders.can_validate:
            raise ConfigError(
                f"eval_strategy={self.args.eval_strategy!r} requires a validation_step and a loader for it; pass "
                f"val_dataloaders, or set eval_strategy='no'"
            )
        vars(self.progress).update(vars(Progress()))
        try:
            return super().train(*args, **options)
        finally:
            self.loaders.tear_down()

    def get_train_dataloader(self) -> Any:
        """The loader of the module's training. Collective."""
        self.loaders.set_up("fit")
        loader = self.loaders.training_loader()
        size = batch_size_of(loader)
        if size is not None:
            self.args.per_device_train_batch_size = size
        self.train_dataset = loader
        is_share = getattr(getattr(loader, "sampler", None), "num_replicas", 1) > 1
        return loader if is_share else self.accelerator.prepare(loader)

    def get_eval_dataloader(self, eval_dataset: object = None) -> Any:
        """The loaders of the validation, in a list."""
        return self.loaders.validation() if eval_dataset is self.loaders else [eval_dataset]

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """The optimizer of `configure_optimizers`."""
        self.optimizer, self.scheduled = read_optimizers(self.model)
        self.attached.set_scheduled(self.scheduled)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Its schedulers."""
        progress = self.progress
        self.lr_scheduler = self.hooks.schedules = Schedules(
            self.optimizer,
            self.scheduled,
            self.hooks.step_scheduler,
            batches=lambda: progress.batches,
            epochs=lambda: progress.epoch + 1,
            metric=lambda name: self.logged.metrics.get(name),
        )
        return self.lr_scheduler

    def training_step(self, model: nn.Module, inputs: Batch, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """`training_step` of the module with the hooks around it, and the backward pass."""
        call, index, module = self.hooks.call, self.progress.batches, self.loaders.module
        step = self._running_step("training_step")
        with self.logged.batch(inputs, is_filler=step.is_filler):
            batch = self._transferred(inputs)
            if call("on_train_batch_start", batch, index) == -1:
                raise ConfigError("on_train_batch_start returned -1; call control.end_epoch() in a callback instead")
            with self.compute_loss_context_manager(), self.logged.within("training_step"):
                outputs = _forward(model, module, arguments_for(module.training_step, batch, index))
                loss: Tensor = step.part_of_step(_loss_of(outputs, type(module).__name__))
            call("on_before_zero_grad", self.optimizer)
            call("on_before_backward", loss)
            self.accelerator.backward(loss)
            call("on_after_backward")
            is_last = self.accelerator.sync_gradients
            if is_last:
                call("on_before_optimizer_step", self.optimizer)
            further = outputs if isinstance(outputs, dict) else {}
            self.hooks.end_batch({**further, "loss": loss.detach()}, batch, is_last=is_last)
        return loss.detach()

    def evaluate(
        self, eval_dataset: object = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> Metrics:
        """Run `validation_step` over the loaders of the validation, or over a loader; returns what it logged."""
        self.loaders.set_up("validate")
        chosen = self.eval_dataset if eval_dataset is None else eval_dataset
        return super().evaluate(chosen, ignore_keys, metric_key_prefix)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """`validation_step` over each loader, with the hooks around it. Collective."""
        call, several, logged = self.hooks.call, len(dataloader) > 1, self.logged
        phase, logged.phase = logged.phase, "validation"
        output = EvalLoopOutput(None, None, {}, 0)
        try:
            with torch.no_grad():
                call("on_validation_start")
                call("on_validation_epoch_start")
                for position, loader in enumerate(dataloader):
                    self._loader, self._batches, self._suffix = position, 0, f"/dataloader_idx_{position}" * several
                    one = super().evaluation_loop(loader, description, True, ignore_keys, metric_key_prefix)
                    metrics = {} if several else one.metrics
                    output = EvalLoopOutput(None, None, metrics, (output.num_samples or 0) + (one.num_samples or 0))
                world = self.session.state.world
                self.hooks.call_at_end("on_validation_epoch_end", "validation", world)
                output.metrics.update(logged.epoch_values("validation", world))
                call("on_validation_end")
        finally:
            logged.phase = phase
        return output

    def prediction_step(
        self, model: nn.Module, inputs: Batch, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, object, object]:
        """`validation_step` of a batch; its loss, if it returns one."""
        call, module, index = self.hooks.call, self.loaders.module, self._batches
        with self.logged.batch(inputs, is_filler=self.session.forward_step.is_filler, suffix=self._suffix):
            batch = self._transferred(inputs, self._loader)
            call("on_validation_batch_start", batch, index, self._loader)
            with self.compute_loss_context_manager(), self.logged.within("validation_step"):
                given = arguments_for(module.validation_step, batch, index, self._loader)
                outputs = module.validation_step(*given)
            call("on_validation_batch_end", outputs, batch, index, self._loader)
        self._batches += 1
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        return loss if isinstance(loss, Tensor) and loss.numel() == 1 else None, None, None

    def predict(self, *args: Any, **options: Any) -> NoReturn:
        """Refused: there is no `predict_step` here.

        Raises:
            ConfigError: always, with what to do instead.
        """
        raise ConfigError(
            "LightningTrainer trains and validates; pass the module to Lightning's Trainer.predict or test"
        )

    def evaluate_in_run(self, ignore_keys: list[str] | None) -> None:
        """The evaluation of a run, and what waits for its metrics. Collective."""
        if self.loaders.can_validate:
            super().evaluate_in_run(ignore_keys)
        self.hooks.finish_waiting(self)

    def _transferred(self, inputs: Batch, loader: int = 0) -> Any:
        """A batch on the device, as `on_after_batch_transfer` of the module returns it."""
        batch = self._prepare_inputs(inputs)
        changed = self.hooks.call("on_after_batch_transfer", batch, loader)
        return batch if changed is None else changed


def _forward(model: Any, module: Any, args: list[object]) -> Any:
    """`module.training_step(*args)`; of a wrapped module in the wrapper's `forward`, which prepares the gradients'
    exchange.
    """
    if model is module:
        return module.training_step(*args)
    own = vars(module).get("forward")

    def restore() -> None:
        vars(module).pop("forward", None)
        if own is not None:
            module.forward = own

    def redirected(*given: object) -> Any:
        restore()
        return module.training_step(*given)

    module.forward = redirected
    try:
        return model(*args)
    finally:
        restore()


def _loss_of(outputs: Any, name: str) -> Tensor:
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ConfigError(
            f"{name}.training_step returned {what} for a loss; return a tensor of one element, or a dict with it as "
            f"'loss' (0 * loss skips a batch)"
        )
    return loss.reshape(())
