"""Calls a user's `compute_metrics`: once for the whole set, or after every batch."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import TypeVar

from torch import Tensor

from onstep.config.hf.arguments import TrainingArguments
from onstep.data import Batch
from onstep.data.loaders.iterable_loader import count_samples
from onstep.distributed import World
from onstep.errors import ConfigError, OnstepError, warn_once
from onstep.record.kinds import Metrics
from onstep.trainer.predictions import Collected, EvalPrediction, join_rows, to_numpy, to_tensors
from onstep.training.compute.batch_notes import contents
from onstep.training.compute.losses import described

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class BatchMetrics:
    """Calls `compute_metrics` after every batch, and with `compute_result=True` after the last.

    It receives tensors on the device, with the samples of all ranks in dataset order.
    """

    def __init__(self, compute_metrics: Callable[..., Metrics], wanted: list[str], world: World) -> None:
        self._compute_metrics = compute_metrics
        self._wanted = wanted
        self._world = world
        self._last: EvalPrediction | None = None
        """The most recent batch: whether it is the last one is known when the next one comes."""

    def add(self, inputs: Batch, logits: object, labels: object, loss: Tensor | None, is_filler: bool) -> None:
        """Add a micro-batch. Collective."""
        losses = None if loss is None else loss.detach().repeat(count_samples(inputs) or 1)
        row = Collected(logits, labels, inputs if "inputs" in self._wanted else None, losses)
        if self._world.data.size > 1:
            own = None if is_filler else Collected(*map(to_numpy, row))
            rows = [one for one in self._world.data.gather(own) if one is not None]
            row = Collected(*(to_tensors(part, self._world.device) for part in join_rows(rows)))
        if row.predictions is None or row.label_ids is None:
            return
        self._compute(is_last=False)
        losses = row.losses if "loss" in self._wanted else None
        self._last = EvalPrediction(row.predictions, row.label_ids, row.inputs, losses)

    def result(self) -> Metrics:
        """The metrics of all batches."""
        return self._compute(is_last=True) or {}

    def _compute(self, *, is_last: bool) -> Metrics | None:
        batch, self._last = self._last, None
        return None if batch is None else call_named(self._compute_metrics, batch, compute_result=is_last)


def batch_metrics(compute: Callable[..., Metrics] | None, args: TrainingArguments, world: World) -> BatchMetrics | None:
    """What calls the user's function after every batch; None if that is not asked for."""
    return BatchMetrics(compute, args.include_for_metrics, world) if compute and args.batch_eval_metrics else None


def call_named(function: Callable[..., Result], *values: object, **named: object) -> Result:
    """`function(*values, **named)`, for a user's function of metrics, which a note on its errors names.

    Raises:
        ConfigError: in place of a `StopIteration`, which would pass for the end of what calls it.
    """
    name = getattr(function, "__qualname__", type(function).__qualname__)
    try:
        return function(*values, **named)
    except OnstepError:
        raise
    except StopIteration as error:
        raise ConfigError(
            f"the metric function {name} raised StopIteration: something in it called next() on an exhausted iterator."
        ) from error
    except Exception as error:
        given = values[0] if len(values) == 1 and isinstance(values[0], EvalPrediction) else values
        error.add_note(f"raised by the metric function {name}, called with {contents(tuple(given))}")
        raise


def prefixed(computed: Metrics, prefix: str, measured: Metrics) -> Metrics:
    """A user's metrics under the prefix, as Python numbers; one that replaces a measured one is named."""
    start = f"{prefix}_"
    metrics = {key if key.startswith(start) else start + key: _plain(value) for key, value in computed.items()}
    replaced = sorted(measured.keys() & metrics.keys())
    if replaced:
        warn_once(logger, f"compute_metrics returns {', '.join(replaced)}, which replaces what was measured")
    return metrics


def _plain(value: object) -> object:
    """A NumPy or torch scalar as a Python number."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value


def check_batch_metrics(compute: Callable[..., object]) -> None:
    """Refuse (ConfigError) a `compute_metrics` that does not know which batch is the last."""
    parameters = inspect.signature(compute).parameters.values()
    if not any(p.name == "compute_result" or p.kind is p.VAR_KEYWORD for p in parameters):
        raise ConfigError(
            "TrainingArguments.batch_eval_metrics=True calls compute_metrics after every batch: it must have "
            "the parameter compute_result, which is True for the last batch, and then return the metrics."
        )


def computed_metrics(
    compute: Callable[..., object] | None, collected: Collected, args: TrainingArguments, *, are_preprocessed: bool
) -> Metrics:
    """The metrics of a whole set; {} without predictions or labels.

    Args:
        compute: the user's function.
        collected: the data of the set.
        args: say which inputs and losses the function gets.
        are_preprocessed: whether `preprocess_logits_for_metrics` made the predictions.

    Raises:
        ConfigError: for anything but metrics by name.
    """
    predictions, label_ids, inputs, losses = collected
    if compute is not None and predictions is None and are_preprocessed:
        logger.warning("compute_metrics is not called: preprocess_logits_for_metrics has returned no predictions")
    if compute is None or predictions is None:
        return {}
    if label_ids is None:
        logger.warning("compute_metrics is not called: the evaluated samples have no labels; set label_names")
        return {}
    wanted_losses = losses if "loss" in args.include_for_metrics else None
    metrics = call_named(compute, EvalPrediction(predictions, label_ids, inputs, wanted_losses))
    if not isinstance(metrics, Mapping):
        raise ConfigError(f"compute_metrics must return a dict of metrics by name, got {described(metrics)}.")
    for name in metrics:
        if not isinstance(name, str):
            raise ConfigError(
                f"compute_metrics must return metrics by name, got the key {name!r}, a {type(name).__name__}; make "
                f"it a string"
            )
    return dict(metrics)
