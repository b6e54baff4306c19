"""Calls a user's forward step, and explains the errors that frequent mistakes in the data cause in it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from onstep.config.suggestions import nearest
from onstep.data.loaders.dead_workers import is_death
from onstep.errors import ConfigError, DataError, OnstepError, text_of
from onstep.training.compute.batch_notes import beyond_embedding, note_of
from onstep.training.compute.failed_lookup import is_of_batch
from onstep.training.compute.losses import IGNORE_INDEX, check_whole, described
from onstep.training.protocols import ForwardStep

_SURPLUS = re.compile(r"(\w+)\.forward\(\) got an unexpected keyword argument '(\w{1,40})'")
_MISSING = re.compile(r"(\w+)\.forward\(\) missing .*required.* arguments?: (.*)")
_LABELS = repr("labels")


def call_forward_step(
    forward_step: ForwardStep, micro_batches: Any, batch: object, model: nn.Module, step: int, **asked: bool
) -> object:
    """What the loss function that the forward step returns gives for its output.

    Any other error gets a note that describes the micro-batch.

    Args:
        step: number of steps that were done before.
        asked: keywords for the loss function.

    Raises:
        ConfigError: for a forward step that returns something else, reads too far, or computes with a weight of which
            each rank has a part.
        DataError: in place of an error of torch or Python that is explained by the micro-batch `batch`.
    """
    try:
        made = forward_step(micro_batches, model)
        if not isinstance(made, (tuple, list)) or len(made) != 2 or not callable(made[1]):
            raise ConfigError(
                f"the forward step returned {described(made)}; it must return (output, loss function), for a loss that "
                f"is a mean: return loss, lambda loss: loss"
            )
        output, loss_function = made
        return loss_function(output, **asked)
    except OnstepError:
        raise
    except StopIteration as error:
        raise ConfigError(
            "the forward step raised StopIteration: something in it called next() on an exhausted iterator; "
            "data_iterator has one micro-batch for each call of the forward step"
        ) from error
    except Exception as error:
        if is_death(error):  # of a data worker, which torch reports from a signal handler
            raise
        check_forward(getattr(model, "module", model))
        if "mixed torch.Tensor and DTensor" in text_of(error):
            check_whole(model.parameters(), text_of(error).split(",")[0])
        if batch is None and micro_batches is not None:
            raise DataError(f"{text_of(error)}: the micro-batch is None; does the collator return it?") from error
        if isinstance(batch, Mapping):
            explanation = _explain(error, batch, model)
        else:
            explanation = _unlike_weights(error, batch, model)
        if explanation is None:
            error.add_note(note_of(error, batch, step, torch.is_grad_enabled()))
            raise
        raise DataError(explanation) from error


def check_forward(module: nn.Module) -> None:
    """Refuse (ConfigError) a model whose class defines no `forward`, as one that misspells it."""
    if getattr(module.forward, "__func__", None) is nn.Module.forward:
        name, known = type(module).__name__, [one for one in vars(type(module)) if not one.startswith("_")]
        raise ConfigError(
            f"{name} has no method forward, which computes its output and loss; define it.{nearest('forward', known)}"
        )


def _explain(error: Exception, batch: Mapping[Any, Any], model: nn.Module) -> str | None:
    """How the micro-batch has caused an error of the forward step; None if it is not known to have."""
    text = text_of(error)
    if isinstance(error, KeyError):
        return _lacking(f"the key {error.args[0]!r}", batch) if is_of_batch(error, batch) else None
    if isinstance(error, TypeError):
        missing = _MISSING.search(text)
        names = {type(model).__name__, type(getattr(model, "module", model)).__name__}
        surplus = _SURPLUS.search(text)
        if surplus and surplus[1] in names and surplus[2] in batch:
            return (
                f"the micro-batch has {surplus[2]!r}, which {surplus[1]}.forward does not accept: give forward that "
                f"parameter, or drop the column; labels that only a loss function needs go to compute_loss_func"
            )
        is_of_model = missing is not None and missing[1] in names
        return _lacking(f"{missing[2]}, required by {missing[1]}.forward", batch) if missing and is_of_model else None
    if isinstance(error, IndexError) and "out of range in self" in text:
        return beyond_embedding(error, batch, model)
    if "'indices'" in text and "embedding" in text:
        floats = [key for key, value in batch.items() if isinstance(value, Tensor) and value.is_floating_point()]
        named = f" In the micro-batch, {', '.join(map(repr, floats))} are floating-point." if floats else ""
        return f"{text}.{named} Ids are integers: convert them with .long()"
    labels = batch.get("labels")
    if "out of bounds" in text and isinstance(labels, Tensor) and not labels.is_floating_point():
        known = labels[labels != IGNORE_INDEX]
        if not known.numel():
            return None
        return (
            f"{text} The labels of this micro-batch are {int(known.min())} to {int(known.max())}; they must be class "
            f"ids from 0 to the number of the model's outputs - 1, or {IGNORE_INDEX}, which is not trained on"
        )
    return _unlike_weights(error, batch, model)


def _lacking(what: str, batch: Mapping[Any, Any]) -> str:
    return (
        f"the micro-batch lacks {what}; it has {', '.join(map(str, batch)) or 'nothing'}. The default collator drops "
        f"strings and None: give the column as numbers or tensors, or pass a collator that converts it"
    )


def _unlike_weights(error: Exception, batch: object, model: nn.Module) -> str | None:
    text = text_of(error)
    if not any(words in text for words in ("dtype", "scalar type", "should be the same")):
        return None
    weights = next((one.dtype for one in model.parameters() if one.is_floating_point()), torch.float32)
    tensors = {name: value.dtype for name, value in _named(batch).items() if isinstance(value, Tensor)}
    labels = tensors.pop(_LABELS, torch.long)
    is_of_layer = "mat1" in text or "bias type" in text
    if "Long" in text and "indices" not in text and labels != torch.long and not is_of_layer:  # of a loss's targets
        return f"{text}: in the micro-batch {_LABELS} is {labels}; convert class ids with .long()"
    unlike = [f"{name} is {dtype}" for name, dtype in tensors.items() if dtype != weights]
    if unlike:
        listed = ", ".join(unlike)
        return f"{text}: in the micro-batch {listed}, the weights are {weights}; convert it, with .to({weights})"
    return None


def _named(batch: object) -> dict[str, object]:
    """The entries of a micro-batch; the last of several in a tuple or list are the labels."""
    if isinstance(batch, Mapping):
        return {repr(key): value for key, value in batch.items()}
    if not isinstance(batch, (tuple, list)):
        return {"the tensor": batch}
    names = [f"element {index}" for index in range(len(batch))]
    return dict(zip([*names[:-1], _LABELS] if len(names) > 1 else names, batch, strict=True))
