"""Collects logits and labels while a set is evaluated, for `compute_metrics` and `predict`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from onstep.distributed import World
from onstep.trainer.outputs import concatenate


class PredictionCollector:
    """Takes each micro-batch's outputs off the device and puts all ranks' rows back into the order of the dataset."""

    def __init__(
        self,
        label_names: list[str],
        ignore_keys: list[str],
        preprocess_logits: Callable[[Any, Any], Any] | None,
        keep_inputs: bool = False,
    ) -> None:
        self._label_names = label_names
        self._ignore_keys = {*ignore_keys, "loss"}
        self._preprocess_logits = preprocess_logits
        self._keep_inputs = keep_inputs
        self._rows: list[tuple[Any, Any, Any] | None] = []

    def add(self, inputs: Any, outputs: Any, has_loss: bool, is_filler: bool) -> None:
        """Take up a micro-batch; a filler only holds its place."""
        if is_filler:
            self._rows.append(None)
            return
        labels = self._labels(inputs)
        logits = self._logits(outputs, has_loss)
        if self._preprocess_logits is not None:
            logits = self._preprocess_logits(logits, labels)
        kept = inputs.get("input_ids") if self._keep_inputs and isinstance(inputs, Mapping) else None
        self._rows.append((_to_numpy(logits), _to_numpy(labels), _to_numpy(kept)))

    def gather(self, world: World) -> tuple[Any, Any, Any]:
        """Predictions, labels and inputs of the whole set, on every rank. Collective."""
        by_rank = world.gather(self._rows)
        rows = [row for same_place in zip(*by_rank, strict=True) for row in same_place if row is not None]
        if not rows:
            return None, None, None
        predictions, labels, inputs = zip(*rows, strict=True)
        return concatenate(list(predictions)), concatenate(list(labels)), concatenate(list(inputs))

    def _labels(self, inputs: Any) -> Any:
        if not isinstance(inputs, Mapping):
            return inputs[-1] if isinstance(inputs, (list, tuple)) and len(inputs) > 1 else None
        found = tuple(inputs[name] for name in self._label_names if inputs.get(name) is not None)
        return None if not found else found[0] if len(found) == 1 else found

    def _logits(self, outputs: Any, has_loss: bool) -> Any:
        if isinstance(outputs, Mapping):
            values = tuple(
                value for key, value in outputs.items() if key not in self._ignore_keys and value is not None
            )
        elif isinstance(outputs, (list, tuple)):
            values = tuple(outputs[1:] if has_loss else outputs)
        else:
            return outputs
        return values[0] if len(values) == 1 else values


def _to_numpy(value: Any) -> Any:
    if isinstance(value, Tensor):
        value = value.detach()
        return (value.float() if value.dtype is torch.bfloat16 else value).cpu().numpy()
    if isinstance(value, Mapping):
        return {key: _to_numpy(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple(_to_numpy(part) for part in value)
    return value
