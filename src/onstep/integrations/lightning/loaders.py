"""Finds the loaders of a training: those that are passed, of a data module, or of the module itself."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sized
from typing import Any

import torch.distributed as dist
from torch import nn

from onstep.data import Batch
from onstep.errors import ConfigError
from onstep.integrations.lightning.definitions import is_defined


class Loaders:
    """The loaders for training and validation, after `prepare_data` and `setup` of the data module and the module."""

    def __init__(self, module: nn.Module, datamodule: Any, train: object, validation: object) -> None:
        if train is not None and hasattr(train, "train_dataloader"):
            datamodule, train = train, None
        if datamodule is not None and (train is not None or validation is not None):
            raise ConfigError("LightningTrainer was given loaders and a datamodule; pass one of them")
        self.module: Any = module
        self.datamodule = datamodule
        self._train, self._validation = train, validation
        self._stages: set[str] = set()
        self._training: Any = None
        self._found: list[Any] | None = None

    @property
    def can_validate(self) -> bool:
        """Whether there is a `validation_step`, and a loader for it."""
        has_loader = self._validation is not None or self._source("val_dataloader") is not None
        return has_loader and is_defined(self.module, "validation_step")

    def set_up(self, stage: str) -> None:
        """Call `prepare_data`, on the first rank of each machine, `setup` and `configure_model`, once. Collective."""
        if not self._stages:
            is_first = int(os.environ.get("LOCAL_RANK", "0")) == 0
            for owner in self._owners("prepare_data"):
                if is_first:
                    owner.prepare_data()
            if dist.is_available() and dist.is_initialized():
                dist.barrier()
        if stage not in self._stages and "fit" not in self._stages:
            for owner in self._owners("setup"):
                owner.setup(stage)
        if not self._stages and is_defined(self.module, "configure_model"):
            self.module.configure_model()
        self._stages.add(stage)

    def tear_down(self) -> None:
        """Call `teardown`; the next training sets up again."""
        for owner in self._owners("teardown"):
            owner.teardown("fit")
        self._stages, self._training, self._found = set(), None, None

    def training_loader(self) -> Iterable[Batch]:
        """The loader of the training, the same one until `tear_down`.

        Raises:
            ConfigError: if there is none, or several.
        """
        if self._training is not None:
            return self._training  # type: ignore[no-any-return]
        source = self._source("train_dataloader")
        found: Any = self._train if self._train is not None or source is None else source.train_dataloader()
        if found is None:
            raise ConfigError("LightningTrainer has no training data; pass train_dataloaders or a datamodule")
        are_loaders = isinstance(found, (list, tuple)) and any(hasattr(one, "dataset") for one in found)
        if are_loaders or isinstance(found, dict) or type(found).__name__ == "CombinedLoader":
            raise ConfigError(
                f"train_dataloader gives a {type(found).__name__} of loaders; return one, over a dataset that joins "
                f"them, such as torch.utils.data.StackDataset or ConcatDataset"
            )
        self._training = found
        return found  # type: ignore[no-any-return]

    def validation(self) -> list[Any]:
        """The loaders of the validation, the same ones each time."""
        if self._found is None:
            source = self._source("val_dataloader")
            found: Any = self._validation
            if found is None and source is not None:
                found = source.val_dataloader()
            self._found = list(found) if isinstance(found, (list, tuple)) else [] if found is None else [found]
        return self._found

    def _source(self, name: str) -> Any:
        """The data module or the module, whichever defines a method."""
        return next(iter(self._owners(name)), None)

    def _owners(self, name: str) -> list[Any]:
        return [one for one in (self.datamodule, self.module) if one is not None and is_defined(one, name)]


def batch_size_of(loader: Any) -> int | None:
    """The batch size of a loader, where it has one."""
    size = getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return size if isinstance(size, int) else None


def length_of(loader: object) -> int | float:
    """The batches of a loader; infinite if unknown."""
    try:
        return len(loader) if isinstance(loader, Sized) else float("inf")
    except TypeError:
        return float("inf")
