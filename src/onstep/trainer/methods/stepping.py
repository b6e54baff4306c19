"""Hugging Face's methods of one micro-batch: inputs, precision, loss and backward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from onstep.data import Batch
from onstep.data.loaders.collate import mapping_like
from onstep.errors import ConfigError
from onstep.record.kinds import Metrics
from onstep.trainer.base_trainer import BaseTrainer
from onstep.trainer.computing.accelerator import Accelerator
from onstep.trainer.dataloaders import forward_parameters
from onstep.trainer.loss_convention import NUM_ITEMS, accepts_num_items, label_parameters, of_model
from onstep.training.compute.step import LastStep, to_device


class SteppingMethods(BaseTrainer):
    """Hugging Face's methods of one micro-batch, and the attributes that they and subclasses read."""

    _stated_can_return_loss: bool | None = None
    stated_label_names: list[str] | None = None
    """What was assigned to `label_names`."""
    place_model_on_device: bool = True
    """Whether a run moves the model to its device."""

    use_apex = use_cuda_amp = use_cpu_amp = do_grad_scaling = False
    """Names of transformers 4 for a training step written for it: the precision is that of `self.accelerator`."""

    # ---- a micro-batch

    def training_step(self, model: nn.Module, inputs: Batch, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """Forward and backward pass of a micro-batch; returns its part of the step's loss, detached.

        An override runs the backward pass itself, by `super().training_step`, `self.accelerator.backward(loss)` or
        `loss.backward()`, any number of times. As in Hugging Face's Trainer, the returned values of a step are added
        up, and losses and gradients are averaged over ranks.

        Args:
            inputs: one micro-batch as the collator returned it, a mapping or a tuple; it is moved to the device here.
            num_items_in_batch: the labels that count in the whole step, over all micro-batches and ranks; None if
                the loss is a mean.
            model: the module in train mode, as it is wrapped for the ranks.

        Raises:
            ConfigError: outside of a run.
        """
        step = self._running_step("training_step")
        parallel, inputs = self._prepare_context_parallel_inputs(model, inputs)
        with parallel():
            model.train()
            inputs = self._prepare_inputs(inputs)
            with self.compute_loss_context_manager():
                further: Metrics = {NUM_ITEMS: num_items_in_batch} if accepts_num_items(self.compute_loss) else {}
                loss: Tensor = step.part_of_step(self.compute_loss(model, inputs, **further))
            del inputs
            self.accelerator.backward(loss)
            return loss.detach()

    def compute_loss_context_manager(self) -> AbstractContextManager[object]:
        """The context of `compute_loss`."""
        stack = ExitStack()
        stack.enter_context(self.autocast_smart_context_manager())
        return stack

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> AbstractContextManager[object]:
        """Autocast in the run's precision.

        Args:
            cache_enabled: whether casts of weights are kept until the block ends.
        """
        if self.session is None:
            return nullcontext()
        context: AbstractContextManager[object] = self.session.state.autocast()
        return context

    def _prepare_inputs(self, inputs: Batch) -> Batch:
        """The inputs of a micro-batch, with every tensor on the device."""
        return self._prepare_input(inputs)

    def _prepare_input(self, data: Batch) -> Batch:
        """A tensor on the device, or a nested structure of them."""
        if isinstance(data, Mapping):
            return mapping_like(data, {key: self._prepare_input(value) for key, value in data.items()})
        if isinstance(data, (tuple, list)) and not hasattr(data, "_fields"):
            return type(data)(self._prepare_input(value) for value in data)
        return to_device(data, self.accelerator.device)

    def _get_num_items_in_batch(self, batch_samples: list[Batch], device: torch.device) -> Tensor | int | None:
        """The number of labels in all micro-batches of a step, over all ranks; None for a loss that is a mean.

        Collective in training.
        """
        step = self._running_step("_get_num_items_in_batch")
        counted: Tensor | None = step.count_items(batch_samples, over_ranks=self.session.model[0].training)
        return counted

    def _running_step(self, name: str) -> Any:
        if self.session is None:
            raise ConfigError(f"Trainer.{name} requires a run; it is called during training.")
        return self.session.forward_step

    # ---- the model

    def call_model_init(self, trial: object = None) -> nn.Module:
        """A new model from `model_init`, which receives `trial` if it has a parameter."""
        model_init = self.model_init
        assert model_init is not None
        model: nn.Module = model_init(trial) if self._makes_model_from_trial() else model_init()
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model_init must return a torch.nn.Module, got {type(model).__name__}.")
        return model

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Move the model to the device of a run; one that is on several devices, or of bitsandbytes, stays there."""
        is_placed = getattr(model, "quantization_method", None) == "bitsandbytes"
        if getattr(model, "hf_device_map", None) is None and not is_placed:
            model.to(device)

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: object = None) -> nn.Module:
        """The model as an override wraps it; returned unchanged, it is wrapped for data parallelism if needed."""
        return model

    def create_accelerator_and_postprocess(self) -> None:
        """Create `self.accelerator`; an override calls `super()` first.

        Raises:
            ConfigError: if an overridden `_build_accelerator_args` changes what the arguments of the Trainer say.
        """
        self.accelerator = Accelerator(self)
        own, built = self._accelerator_args(), self._build_accelerator_args(**self._accelerator_args())
        changed = [name for name, value in built.items() if own.get(name) != value]
        if changed:
            raise ConfigError(
                f"{type(self).__name__}._build_accelerator_args sets {', '.join(changed)}, but the accelerator has the "
                f"ranks and the precision of the run; configure them with TrainingArguments."
            )

    def _build_accelerator_args(self, **kwargs: object) -> dict[str, Any]:
        """The arguments of the accelerator, with those given; an override that changes them is refused."""
        return {**self._accelerator_args(), **kwargs}

    def _accelerator_args(self) -> dict[str, Any]:
        return {
            "dataloader_config": self.accelerator.dataloader_config,
            "mixed_precision": self.args.mixed_precision,
            "deepspeed_plugin": None,
        }

    @property
    def model_wrapped(self) -> nn.Module | None:
        """The model as the loop trains it, wrapped if there are several ranks."""
        return self.model if self.session is None else self.session.model[0]

    @property
    def is_model_parallel(self) -> bool:
        """Whether the layers of the model are on several devices."""
        places = getattr(self.model, "hf_device_map", None) or {}
        return len({str(place) for place in places.values()} - {"cpu", "disk"}) > 1

    @property
    def model_accepts_loss_kwargs(self) -> bool:
        """Whether the model divides its loss by `num_items_in_batch`; assign it before training to state it."""
        if self.stated_loss_kwargs is not None:
            return self.stated_loss_kwargs
        return self.model is not None and of_model(self.model) == "share"

    @model_accepts_loss_kwargs.setter
    def model_accepts_loss_kwargs(self, accepts: bool) -> None:
        self.stated_loss_kwargs = accepts

    @property
    def label_names(self) -> list[str]:
        """The keys of the labels: `args.label_names`, else the parameters of `forward` that are named like labels.

        It may be assigned before a run.
        """
        if self.stated_label_names is not None:
            return self.stated_label_names
        if self.args.label_names is not None:
            return list(self.args.label_names)
        return [] if self.model is None else label_parameters(self.model)

    @label_names.setter
    def label_names(self, names: list[str]) -> None:
        self.stated_label_names = names

    @property
    def can_return_loss(self) -> bool:
        """Whether the model has a parameter `return_loss` that is True by default; it may be assigned.

        Without `label_names`, predictions then have a loss, as in Hugging Face.
        """
        if self._stated_can_return_loss is not None:
            return self._stated_can_return_loss
        parameters = [] if self.model is None else forward_parameters(self.model)
        return any(one.name == "return_loss" and one.default is True for one in parameters)

    @can_return_loss.setter
    def can_return_loss(self, value: bool) -> None:
        self._stated_can_return_loss = value

    def _gives_loss_without_labels(self, inputs: Batch) -> bool:
        """Whether a batch has a loss without label names: its `return_loss` says so, else `can_return_loss`."""
        asked = inputs.get("return_loss") if isinstance(inputs, Mapping) else None
        returns = self.can_return_loss if asked is None else asked
        return bool(returns) and not self.label_names

    @property
    def current_gradient_accumulation_steps(self) -> int:
        """Micro-batches of the current step."""
        step = None if self.session is None else self.session.state.features.room(LastStep).step
        return self.args.gradient_accumulation_steps if step is None else len(step.batches.micro_batches)

    def get_sp_size(self) -> int:
        """1: sequences are not split over ranks."""
        return 1

    def get_cp_size(self) -> int:
        """1: contexts are not split over ranks."""
        return 1

    def get_tp_size(self) -> int:
        """The number of ranks over which the tensors of a layer are split."""
        return int(self.args.parallel_sizes.tp)

    _makes_model_from_trial: Callable[[], bool]
