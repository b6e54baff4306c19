"""Keeps evaluation loaders whose worker processes stay for the next evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from torch.utils.data import DataLoader

from onstep.data.loaders.eval_loader import EvalLoader


class KeptLoaders:
    """Evaluation loaders with persistent workers, by the dataset or by the user's loader that they read.

    They end with `close`, or with this object; those of a user's loader also when nothing else refers to it.
    """

    def __init__(self) -> None:
        self._of_datasets: list[tuple[object, object, tuple[object, ...], EvalLoader]] = []
        self._of_loaders: WeakKeyDictionary[DataLoader[Any], EvalLoader] = WeakKeyDictionary()

    def __reduce__(self) -> tuple[object, ...]:
        """Keep none in a copy, or in the process that it is sent to."""
        return type(self), ()

    def of_dataset(
        self, dataset: object, collator: object, values: tuple[object, ...], make: Callable[[], EvalLoader]
    ) -> EvalLoader:
        """The loader that was kept for this dataset and collator, and with equal `values`, else a new one."""
        for known, known_collator, known_values, loader in self._of_datasets:
            if known is dataset and known_collator is collator and known_values == values:
                return loader
        made = make()
        if made.keeps_workers:
            self._of_datasets.append((dataset, collator, values, made))
        return made

    def of_loader(self, given: object, make: Callable[[], EvalLoader]) -> EvalLoader:
        """The loader that was kept for a user's loader, in the order that this one has now, else a new one."""
        made = make()
        if not isinstance(given, DataLoader) or not made.keeps_workers:
            return made
        kept = self._of_loaders.setdefault(given, made)
        kept.read_in_order_of(made)
        return kept

    def close(self) -> None:
        """End the workers, and forget the loaders."""
        for loader in (*(entry[-1] for entry in self._of_datasets), *self._of_loaders.values()):
            loader.close()
        self._of_datasets.clear()
        self._of_loaders.clear()
