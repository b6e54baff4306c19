"""Base classes with Lightning's names, for modules in an environment without Lightning."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn


class _HyperParameters:
    """`save_hyperparameters` and `hparams`."""

    hparams: Any

    def save_hyperparameters(self, *names: object, ignore: object = (), logger: bool = True) -> None:
        """Keep the arguments of the calling constructor in `self.hparams`: those of `names`, or all but `ignore`."""
        frame = inspect.currentframe()
        caller = None if frame is None else frame.f_back
        if names and not all(isinstance(one, str) for one in names):
            given = [one if isinstance(one, Mapping) else vars(one) for one in names]
            values = {key: value for one in given for key, value in one.items()}
        else:
            values = {} if caller is None else _arguments(caller.f_locals, caller.f_code.co_varnames)
            left_out = {ignore} if isinstance(ignore, str) else set(ignore)  # type: ignore[call-overload]
            values = {k: v for k, v in values.items() if k not in left_out and (not names or k in names)}
        self.hparams = HyperParameters(**{**vars(getattr(self, "hparams", SimpleNamespace())), **values})


class HyperParameters(SimpleNamespace):
    """Values that are read as attributes or as items."""

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def __contains__(self, name: str) -> bool:
        return hasattr(self, name)

    def keys(self) -> list[str]:
        """The names."""
        return list(vars(self))


class LightningModule(_HyperParameters, nn.Module):
    """A module for `LightningTrainer` where Lightning is not installed: what that of Lightning offers to its methods.

    Define `training_step`, `configure_optimizers` and, if there is validation data, `validation_step`.
    """

    automatic_optimization = True
    trainer: Any = None

    @property
    def current_epoch(self) -> int:
        """The epoch that is trained, from 0."""
        return 0 if self.trainer is None else int(self.trainer.current_epoch)

    @property
    def global_step(self) -> int:
        """Optimizer steps so far."""
        return 0 if self.trainer is None else int(self.trainer.global_step)

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next((one.device for one in self.parameters()), torch.device("cpu"))

    def log(self, name: str, value: object, **options: object) -> None:
        """Log a value; outside of a LightningTrainer, nothing."""

    def log_dict(self, dictionary: dict[str, object], **options: object) -> None:
        """Log several values."""


class LightningDataModule(_HyperParameters):
    """Holds loaders, where Lightning is not installed."""

    trainer: Any = None

    def prepare_data(self) -> None:
        """Download or convert; called on the first rank of each machine."""

    def setup(self, stage: str) -> None:
        """Make the datasets; called on every rank with "fit" or "validate"."""

    def teardown(self, stage: str) -> None:
        """Release them."""


def _arguments(local: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """The arguments of a running constructor, with those of its `**kwargs`."""
    owner = local.get("self")
    parameters = inspect.signature(type(owner).__init__).parameters if owner is not None else {}
    found: dict[str, Any] = {}
    for name, parameter in list(parameters.items())[1:]:
        if parameter.kind is parameter.VAR_KEYWORD:
            found |= local.get(name, {})
        elif name in local and name in names:
            found[name] = local[name]
    return found
