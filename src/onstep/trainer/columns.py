"""Leaves out the columns of a sample that the model's `forward` does not take."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from onstep.errors import DataError

LABEL_COLUMNS = ("label", "label_ids", "labels")


class ColumnFilter:
    """A collator that drops the columns which `forward` has no parameter for, then collates as `collate` does."""

    def __init__(self, collate: Callable[[Sequence[Any]], Any], model: nn.Module, label_names: list[str]) -> None:
        self._collate = collate
        parameters = inspect.signature(model.forward).parameters
        self._names = {*parameters, *LABEL_COLUMNS, *label_names}
        self._model_name = type(model).__name__

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Collate a list of samples."""
        if samples and isinstance(samples[0], Mapping):
            kept = [{key: value for key, value in sample.items() if key in self._names} for sample in samples]
            if not kept[0]:
                raise DataError(
                    f"No column of the dataset ({', '.join(samples[0])}) is a parameter of {self._model_name}.forward; "
                    f"rename the columns, or pass remove_unused_columns=False with your own data_collator."
                )
            samples = kept
        return self._collate(samples)
