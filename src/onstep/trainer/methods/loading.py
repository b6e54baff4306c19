"""Hugging Face's methods that create data loaders and samplers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any

from torch.utils.data import SequentialSampler

from onstep.data import Batch, is_map_style
from onstep.data.loaders.collate import Collate
from onstep.errors import ConfigError
from onstep.trainer.base_trainer import BaseTrainer
from onstep.trainer.dataloaders import LABEL_COLUMNS, column_filter, parameters_of
from onstep.trainer.loaders.samplers import Order, call_train_sampler, training_sampler
from onstep.trainer.loaders.torch_loaders import LoaderOptions, evaluation_loader, training_loader
from onstep.trainer.loaders.users_data import decides_data
from onstep.training.runs.fingerprints import is_arrow_dataset

logger = logging.getLogger(__name__)


class LoadingMethods(BaseTrainer):
    """Hugging Face's methods that create data loaders and samplers.

    Overridden, they decide what a run reads. The defaults return a torch DataLoader with the batches that a run on this
    rank reads; a run itself uses Onstep's loaders, which give the same.
    """

    _signature_columns: list[str] | None = None
    """The columns that reach the collator, where a subclass sets them; None is the parameters of `forward`."""

    _eval_dataloaders: Sequence[tuple[object, Iterable[Batch]]] = ()
    """The loaders of evaluation sets whose workers are kept."""

    @property
    def _train_batch_size(self) -> int:
        """The size of a micro-batch: with `auto_find_batch_size`, the one that fitted into memory."""
        search, given = self.batch_size_search, self.args.train_batch_size
        return search.size if search is not None and search.given == given else given

    def get_train_dataloader(self) -> Iterable[Batch]:
        """A DataLoader of the training set: this rank's micro-batches, in the order of a training.

        `set_epoch` of its sampler selects the epoch.

        Raises:
            ConfigError: without a training set.
        """
        if self.train_dataset is None:
            raise ConfigError("Trainer.get_train_dataloader requires a train_dataset; pass one to the constructor.")
        return self._get_dataloader(
            self.train_dataset, "Training", self._train_batch_size, self._get_train_sampler, is_training=True
        )

    def get_eval_dataloader(self, eval_dataset: object = None) -> Iterable[Batch]:
        """A DataLoader of an evaluation set: one passed here, one of a dict by name, or the constructor's.

        With `dataloader_persistent_workers`, the same one for the same set.

        Args:
            eval_dataset: the dataset, or the name of one of `eval_dataset`; None for the Trainer's own.

        Raises:
            ConfigError: without an evaluation set.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str) and isinstance(self.eval_dataset, Mapping):
            dataset = self.eval_dataset.get(dataset)
        if dataset is None or isinstance(dataset, (str, dict)):
            raise ConfigError(
                "Trainer.get_eval_dataloader requires an eval_dataset: a dataset, or the name of one of several."
            )
        kept = next((loader for one, loader in self._eval_dataloaders if one is dataset), None)
        if kept is not None and self.args.dataloader_persistent_workers:
            return kept
        loader = self._get_dataloader(dataset, "Evaluation", self.args.eval_batch_size, self._get_eval_sampler)
        if getattr(loader, "persistent_workers", False):
            self._eval_dataloaders = [*self._eval_dataloaders, (dataset, loader)]
        return loader

    def get_test_dataloader(self, test_dataset: object) -> Iterable[Batch]:
        """A DataLoader of a test set.

        Args:
            test_dataset: the samples to predict, as the model's inputs; labels may be absent.
        """
        return self._get_dataloader(test_dataset, "test", self.args.eval_batch_size, self._get_eval_sampler)

    def num_examples(self, dataloader: Any) -> int:
        """Number of samples of a DataLoader's dataset; if that has no length, its batches times the batch size.

        Args:
            dataloader: the loader whose samples are counted.
        """
        try:
            return len(dataloader.dataset)
        except (AttributeError, TypeError):
            return len(dataloader) * self.args.per_device_train_batch_size

    def _get_dataloader(
        self,
        dataset: object,
        description: str,
        batch_size: int,
        sampler_fn: Callable[..., Order | None] | None = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> Iterable[Batch]:
        collate, whole = self.data_collator, dataset
        if is_arrow_dataset(dataset):
            dataset = self._remove_unused_columns(dataset, description=description)
        else:
            collate = self._get_collator_with_removed_columns(collate, description=description)
        args = self.args
        has_workers = args.dataloader_num_workers > 0
        options: LoaderOptions = {
            "collate_fn": collate,
            "num_workers": args.dataloader_num_workers,
            "pin_memory": args.dataloader_pin_memory,
            "persistent_workers": args.dataloader_persistent_workers and has_workers,
            "prefetch_factor": args.dataloader_prefetch_factor if has_workers else None,
            "multiprocessing_context": args.dataloader_multiprocessing_context if has_workers else None,
        }
        sampler = None
        if sampler_fn is not None and is_map_style(dataset):
            sampler = call_train_sampler(sampler_fn, whole)  # which may read columns that the model does not
        if not is_training:
            return evaluation_loader(args, dataset, batch_size, sampler, **options)
        # without a user's method, a training drops a tail that is shorter than a step
        unit = args.world_size * (1 if decides_data(self) else args.gradient_accumulation_steps)
        return training_loader(args, dataset, batch_size, sampler, unit, **options)

    def _get_train_sampler(self, train_dataset: object = None) -> Order | None:
        dataset = self.train_dataset if train_dataset is None else train_dataset
        return training_sampler(self.args, dataset, self.processing_class)

    def _get_eval_sampler(self, eval_dataset: Sized) -> Order | None:
        return SequentialSampler(eval_dataset) if is_map_style(eval_dataset) else None

    def _set_signature_columns_if_needed(self) -> None:
        if self._signature_columns is None and self.model is not None:
            names: list[str] = self.label_names  # type: ignore[attr-defined]
            labels = sorted(LABEL_COLUMNS.union(names))
            parameters = parameters_of(self.model)
            self._signature_columns = [*parameters, *(name for name in labels if name not in parameters)]

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        if not self.args.remove_unused_columns:
            return dataset
        if self._signature_columns is None and self.model is not None and not parameters_of(self.model):
            return dataset  # forward accepts every column
        self._set_signature_columns_if_needed()
        columns = self._signature_columns or []
        unused = [name for name in dataset.column_names if name not in columns]
        if len(unused) == len(dataset.column_names):
            raise ConfigError(
                f"No column of the dataset ({', '.join(unused)}) is a parameter of forward ({', '.join(columns)}); "
                "rename the columns, or set remove_unused_columns=False."
            )
        if unused:
            logger.info("columns of the %s set that forward does not accept: %s", description, ", ".join(unused))
        return dataset.remove_columns(unused)

    def _get_collator_with_removed_columns(self, data_collator: Collate, description: str | None = None) -> Collate:
        return column_filter(self, data_collator)
