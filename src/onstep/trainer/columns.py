"""Leaves out the columns of a sample that the model's `forward` does not take."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from onstep.data import is_map_style
from onstep.errors import DataError
from onstep.trainer.wrappers import inner_module

LABEL_COLUMNS = frozenset({"label", "label_ids", "labels"})


class ColumnFilter:
    """A collator that drops the columns which `forward` has no parameter for, then collates as `collate` does.

    Labels are kept whatever `forward` takes. A `forward` that names no parameter (`*args, **kwargs`) takes everything.
    """

    def __init__(
        self, collate: Callable[[Sequence[Any]], Any], model: nn.Module, label_names: Iterable[str] = ()
    ) -> None:
        self._collate = collate
        self._labels = LABEL_COLUMNS.union(label_names)
        self._parameters = _named_parameters(model)
        self._wanted = self._parameters | self._labels
        self._model_name = type(model).__name__

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Collate a list of samples.

        Raises:
            DataError: when no column is left.
        """
        if self._parameters and samples and isinstance(samples[0], (dict, Mapping)):
            wanted = self._wanted
            if all(map(wanted.issuperset, samples)):
                samples = list(map(dict, samples))  # copies, since a collator may change what it is given
            else:
                samples = [{key: value for key, value in sample.items() if key in wanted} for sample in samples]
            if not samples[0]:
                raise DataError(f"The samples have no column that {self._model_name}.forward takes.")
        return self._collate(samples)

    def check(self, dataset: Any) -> None:
        """Check that a dataset has a column for the model, by its `column_names` or its first sample.

        Raises:
            DataError: when it has none.
        """
        columns = _columns_of(dataset)
        if not self._parameters or columns is None or (self._parameters - self._labels).intersection(columns):
            return
        if not self._parameters - self._labels:  # the model takes labels alone
            return
        raise DataError(
            f"No column of the dataset ({', '.join(columns)}) is a parameter of {self._model_name}.forward "
            f"({', '.join(sorted(self._parameters))}); rename the columns, or pass remove_unused_columns=False with "
            f"your own data_collator."
        )


def _named_parameters(model: nn.Module) -> frozenset[str]:
    kinds = inspect.Parameter
    parameters = inspect.signature(inner_module(model).forward).parameters.values()
    return frozenset(p.name for p in parameters if p.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD))


def _columns_of(dataset: Any) -> list[str] | None:
    names = getattr(dataset, "column_names", None)
    if isinstance(names, list):
        return names
    if not is_map_style(dataset) or len(dataset) == 0:
        return None
    first = dataset[0]
    return list(first) if isinstance(first, Mapping) else None
