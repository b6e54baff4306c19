"""Lists the hooks that are called and those that are refused, and checks a module against them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from onstep.errors import ConfigError

CALLED = (
    "on_fit_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_validation_end",
    "on_train_epoch_end",
    "on_train_end",
    "on_fit_end",
    "on_after_batch_transfer",
    "on_save_checkpoint",
    "on_load_checkpoint",
    "lr_scheduler_step",
    "training_step",
    "validation_step",
)
"""Methods of a module that a training calls, where Lightning calls them."""

_LOOP = "the loop does this itself"
REFUSED = {
    "backward": f"{_LOOP}; use on_before_backward and on_after_backward",
    "optimizer_step": f"{_LOOP}; use on_before_optimizer_step, or an optimizer whose step() does what you need",
    "optimizer_zero_grad": f"{_LOOP}; use on_before_zero_grad",
    "configure_gradient_clipping": "set TrainingArguments(max_grad_norm=...), or clip in on_before_optimizer_step",
    "configure_callbacks": "pass Onstep's callbacks to LightningTrainer",
    "configure_sharded_model": "models are not sharded; build the layers in configure_model",
    "on_before_batch_transfer": "do this in the dataset or the collate_fn, or in on_after_batch_transfer",
    "transfer_batch_to_device": "return tensors, or dicts, lists and tuples of them, from the collate_fn",
    "on_validation_model_eval": "set the modes in on_validation_start; each layer gets its own back afterwards",
    "on_validation_model_train": "each layer gets its own mode back after an evaluation",
    "on_validation_model_zero_grad": "gradients are cleared when a step begins",
}
"""Methods that nothing would call, and what to do instead."""


def is_defined(owner: object, name: str) -> bool:
    """Whether a user's class defines a method, rather than Lightning's base class or the one here."""
    if name in vars(owner):
        return True
    cls = next((one for one in type(owner).__mro__ if name in vars(one)), None)
    bases = ("lightning.pytorch.core", "pytorch_lightning.core", "onstep.integrations", "torch.nn")
    return cls is not None and not cls.__module__.startswith(bases)


def check_module(module: Any) -> Any:
    """Check that a module can be trained here, and return it.

    Raises:
        ConfigError: for what is not a module of Lightning's form, and for methods and settings that would not count.
    """
    if not isinstance(module, nn.Module):
        kind = module.__name__ if isinstance(module, type) else type(module).__name__
        raise ConfigError(f"LightningTrainer trains a module, got {kind}; pass an instance of a LightningModule")
    name = type(module).__name__
    lacking = [one for one in ("training_step", "configure_optimizers") if not is_defined(module, one)]
    if lacking:
        raise ConfigError(f"{name} defines no {' and no '.join(lacking)}; define it, or use onstep.Trainer")
    if getattr(module, "automatic_optimization", True) is False:
        raise ConfigError(
            f"{name} sets automatic_optimization=False, and its training_step steps the optimizers itself; let the "
            f"loop step one, or move the code into an onstep.Trainer whose training_step runs the backward passes"
        )
    found = [one for one in REFUSED if is_defined(module, one)]
    if found:
        remedies = "; ".join(f"for {one}: {REFUSED[one]}" for one in found)
        raise ConfigError(f"{name} defines {', '.join(found)}, which LightningTrainer does not call. {remedies}.")
    step: Any = module.training_step
    taken = {"dataloader_iter", "optimizer_idx"} & set(inspect.signature(step).parameters)
    if taken:
        raise ConfigError(
            f"{name}.training_step has the parameter {taken.pop()}, which Lightning 1 passed; it is called with "
            f"(batch, batch_idx)"
        )
    return module


def check_datamodule(datamodule: object) -> None:
    """Refuse (ConfigError) methods of a data module that nothing would call."""
    names = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
    found = [name for name in names if is_defined(datamodule, name)]
    if found:
        raise ConfigError(
            f"{type(datamodule).__name__} defines {', '.join(found)}, which LightningTrainer does not call on a data "
            f"module; define on_after_batch_transfer on the module, or do it in the dataset or the collate_fn"
        )


def check_callbacks(callbacks: object) -> None:
    """Refuse (ConfigError) callbacks of Lightning: their methods have other arguments."""
    for one in callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]:
        if any(f"{cls.__module__}.".startswith(("lightning.", "pytorch_lightning.")) for cls in type(one).__mro__):
            raise ConfigError(
                f"{type(one).__name__} is a callback of Lightning, whose methods have other arguments; use "
                f"TrainingArguments for checkpoints and the best model, onstep.callbacks.EarlyStopping, or write an "
                f"onstep.TrainerCallback"
            )


def arguments_for(function: Callable[..., Any], *given: object) -> list[object]:
    """As many of `given` as a step has parameters for: the batch, its index, the index of the loader."""
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(one.kind is one.VAR_POSITIONAL for one in parameters)
    return list(given if takes_all else given[: len(parameters)])
