"""One loss for any split of a step into micro-batches and ranks.

A forward step's loss function may return, as in Megatron Bridge,

- `(loss_sum, num_tokens, report)`: exact for every split;
- `(loss, report)` or a bare loss: the mean over the micro-batch. It is weighted by the micro-batch's labels if known,
  else by its samples, or as `train.loss_weighting` says;
- `LossShare(loss, num_items, report)`: the micro-batch's share of the step's loss, already divided by the `num_items`
  of the whole step (Hugging Face's `num_items_in_batch`).

Every backward pass starts from `loss * weight / nominal`, with one `nominal` for all micro-batches and ranks; once the
step's true weight is known, gradients are scaled once by `nominal / weight`, folded into clipping. float16 multiplies
the start by its loss scale, which the same factor undoes.

The mean over no labels is NaN and has no weight. Its gradients must be zeros, as those of torch's losses are: a sum
divided by a count of 0 has NaN gradients, and the step is rejected as not finite.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.overrides import has_torch_function_unary

from onstep.data.loaders.iterable_loader import count_samples
from onstep.distributed.shards import as_dtensor
from onstep.errors import ConfigError, LossError, text_of
from onstep.training.compute.batch_notes import SECOND_BACKWARD

Scalar = Tensor | float
Kind = Literal["sum", "mean", "share"]
IGNORE_INDEX = -100
"""Labels with this value are not trained on."""

_READ_AT_ONCE = torch.device("cpu"), (torch.int64, torch.int32, torch.float32, torch.float64)
_PLAIN = Tensor.backward, torch.autograd.backward
_HAS_ENGINE = hasattr(torch.autograd, "_engine_run_backward")
_ones: dict[tuple[torch.dtype, torch.device], Tensor] = {}


ONE_ELEMENT = (
    "it must be a floating-point tensor of one element: reduce the losses of samples or tokens with .mean(), and keep "
    "the tensor instead of .item()"
)
"""What a loss must be, for errors."""


NO_GRADIENT = (
    "the loss does not require a gradient, so nothing can be trained on it: it was computed under torch.no_grad(), "
    "from a detached tensor (.detach(), .item(), .numpy(), torch.tensor(...)), or from frozen parameters only; return "
    "the loss as it is computed from the model's outputs"
)
"""The text of an error."""


_A_COUNT = "it must be one number >= 0, of the labels that the loss is computed from: labels.ne(-100).sum()"


class LossShare(NamedTuple):
    """A micro-batch's share of the step's loss."""

    loss: Tensor
    """The loss of the micro-batch, a 0-d tensor."""
    num_items: Scalar | None
    """Number of items of this micro-batch on this rank; None if unknown."""
    report: Mapping[str, object]
    """Values to report, by name."""


class MeanLoss(NamedTuple):
    """The mean loss of a micro-batch, with a weight that the forward step supplies."""

    loss: Tensor
    """The loss of the micro-batch, a 0-d tensor."""
    weight: Scalar
    """The weight of the mean, such as the number of its labels; a 0-d tensor."""
    tokens: Scalar | None
    """The number of tokens that count."""
    report: Mapping[str, object]
    """Values to report, by name."""


def run_backward(loss: Tensor) -> None:
    """`loss.backward()` for one element, without torch's overhead around its engine: a fifth of a small model's step.

    The engine starts from a cached 1, instead of a new one for each step. Special cases are left to `loss.backward()`:
    tensor subclasses, function modes, other shapes, and a replaced `backward`.
    """
    is_plain = type(loss) is Tensor and loss.ndim == 0 and not has_torch_function_unary(loss)
    if not (is_plain and _HAS_ENGINE and _PLAIN[0] is Tensor.backward and _PLAIN[1] is torch.autograd.backward):
        loss.backward()  # type: ignore[no-untyped-call]
        return
    key = loss.dtype, loss.device
    one = _ones.get(key)
    if one is None or one._version:  # a hook has written to it
        one = _ones[key] = torch.ones_like(loss)
    torch.autograd._engine_run_backward(  # type: ignore[attr-defined]
        (loss,), (one,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


@dataclass(slots=True)
class MicroLoss:
    """The loss of one micro-batch."""

    loss: Tensor
    weight: Scalar
    """Number of tokens or samples that it represents; 0 for a filler."""
    kind: Kind
    report: Mapping[str, object]
    tokens: Scalar | None
    """Number of labels trained on, if known."""

    def __post_init__(self) -> None:
        """Check the loss.

        Raises:
            ConfigError: if it is not a floating-point tensor of one element, or is a DTensor.
        """
        loss: object = self.loss
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            raise ConfigError(f"the loss is {described(loss)}; {ONE_ELEMENT}")
        if type(loss) is not Tensor:
            check_whole([loss], "the loss is a DTensor")

    def keep(self) -> None:
        """Copy loss and report into memory of their own, without their graphs; call it after the backward pass.

        A loss may be a view of a larger tensor, and what a CUDA graph returns is overwritten by its next replay.
        """
        self.loss = self.loss.detach().clone()
        if self.report and isinstance(self.report, Mapping):
            self.report = {key: owned(value) for key, value in self.report.items()}

    def backward(self, start: Scalar | None) -> None:
        """Run backward from `loss * start`; None means 1.

        Raises:
            ConfigError: if the loss depends on no parameter that is trained, or a backward pass has been run on it.
        """
        if not self.loss.requires_grad:
            raise ConfigError(NO_GRADIENT)
        loss = self.loss
        try:
            if start is None:
                run_backward(loss)
                return
            if isinstance(start, Tensor):
                gradient = start.to(device=loss.device, dtype=loss.dtype)
            else:
                gradient = as_scalar(start, loss.dtype, loss.device)
            loss.backward(gradient.reshape(loss.shape))  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if "backward through the graph a second time" in text_of(error):
                raise ConfigError(f"the graph of the loss has no values any more: {SECOND_BACKWARD}") from error
            if "modified by an inplace operation" in text_of(error):
                error.add_note(
                    "an operation of the forward pass (x += 1, x[0] = 1, relu_()) has overwritten a value that the "
                    "backward pass requires; write x = x + 1 there, or x = x.clone() before it"
                )
            raise


def check_whole(tensors: Iterable[Tensor], sign: str) -> None:
    """Refuse (ConfigError) a loss that computes with a weight of which each rank has a part.

    Args:
        tensors: what may be divided between ranks.
        sign: of such a loss, in words.
    """
    one = next((found for found in map(as_dtensor, tensors) if found is not None), None)
    if one is None:
        return
    is_in_shards = any(axis.startswith("dp") for axis in one.device_mesh.mesh_dim_names or ())
    remedy = (
        "compute that part of the loss in the model's forward(), where weights in shards are gathered"
        if is_in_shards
        else "use its whole value, weight.full_tensor(), on all ranks"
    )
    raise ConfigError(
        f"{sign}: the forward step or its loss computes with a weight of which each of {one.device_mesh.size()} ranks "
        f"has a part; {remedy}."
    )


def read_loss(result: object, batch: object, weighting: str, is_filler: bool) -> MicroLoss:
    """Interpret the return value of a loss function.

    Where the labels are unknown they are so for a filler too, since ranks sum what all of them know, or nothing.

    Raises:
        LossError: if it has none of the documented forms.
        ConfigError: if a count is not one number >= 0, as far as that is known without reading an accelerator.
    """
    if isinstance(result, LossShare):
        items = None if result.num_items is None else counted("num_items", result.num_items)
        items = 0 if is_filler and items is not None else items
        weight = 0 if is_filler else 1.0 if items is None else items
        return MicroLoss(result.loss, weight, "share", result.report, items)
    if isinstance(result, MeanLoss):
        loss, weight, tokens, report = result
        is_counted = tokens is weight
        weight = counted("weight", weight)
        tokens = 0 if is_filler and tokens is not None else weight if is_counted else owned(tokens)
        return MicroLoss(loss, 0 if is_filler else weight, "mean", report, tokens)
    if isinstance(result, tuple) and len(result) == 3:
        loss, num_tokens, report = result
        weight = counted("num_tokens", num_tokens)
        weight = 0 if is_filler else weight
        return MicroLoss(loss, weight, "sum", report, weight)
    if isinstance(result, Tensor):
        result = (result, {})
    if isinstance(result, tuple) and len(result) == 2:
        loss, report = result
        tokens = count_labels(batch)
        if is_filler:
            return MicroLoss(loss, 0, "mean", report, None if tokens is None else 0)
        weight = mean_weight(batch, tokens, weighting) if tokens is None or weighting != "auto" else tokens
        return MicroLoss(loss, weight, "mean", report, tokens)
    raise LossError(
        f"The loss function returned {described(result)}; it must return (loss_sum, num_tokens, report), "
        f"(mean_loss, report) or a mean loss."
    )


def counted(name: str, count: Any) -> Scalar:
    """A count that a loss function returns; a tensor as a copy of no dimension, see `MicroLoss.keep`.

    Raises:
        ConfigError: if it is not one number, or known to be negative: a tensor on an accelerator is not read here, but
            `check_tokens` reads the sum.
    """
    if not isinstance(count, Tensor):
        if isinstance(count, Real) and not count < 0:
            return count  # type: ignore[return-value]
        raise ConfigError(f"the loss function returned {name}={count!r}; {_A_COUNT}")
    if count.numel() != 1:
        raise ConfigError(f"the loss function returned {described(count)} as {name}; {_A_COUNT}: add up one per row")
    device, dtypes = _READ_AT_ONCE
    is_readable = count.device == device and type(count) is Tensor and count.dtype in dtypes
    if is_readable and not count.requires_grad and count.numpy() < 0:  # without an operator, nor anything to wait for
        raise ConfigError(f"the loss function returned {name}={count.numpy().item()}; {_A_COUNT}")
    copy: Tensor = owned(count)
    return copy.reshape(()) if copy.ndim else copy


def check_tokens(num_tokens: int) -> None:
    """Refuse (ConfigError) a negative sum of counts, now that it is read: the gradients have been divided by it."""
    if num_tokens < 0:
        raise ConfigError(f"the counts that the loss function returned add up to {num_tokens}; num_tokens: {_A_COUNT}")


def described(value: object) -> str:
    """A value in an error: its type, and the shape and dtype of a tensor."""
    if isinstance(value, Tensor):
        return f"a {type(value).__name__} of shape {tuple(value.shape)} and {value.dtype}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, Mapping):
        return f"a mapping with {', '.join(map(str, value)) or 'no entries'}"
    return "None" if value is None else f"a {type(value).__name__}"


def mean_weight(batch: object, labels: Scalar | None, weighting: str) -> Scalar:
    """The weight of a mean loss over `batch`: its labels, its samples, or 1.

    Raises:
        ConfigError: if tokens are requested and the micro-batch has no labels to count.
    """
    if weighting == "samples" or (weighting == "auto" and labels is None):
        samples = count_samples(batch)
        return 1.0 if samples is None else float(samples)
    if weighting == "microbatches":
        return 1.0
    if labels is None:
        raise ConfigError(
            "train.loss_weighting=tokens counts the `labels` (batch, seq) of a micro-batch, but this one has none; use "
            "train.loss_weighting=samples, or return (loss_sum, num_tokens, report) from the loss function."
        )
    return labels


def count_labels(batch: object) -> Scalar | None:
    """Number of labels of a micro-batch that are trained on, as a 0-d tensor; None without sequence labels."""
    if type(batch) is not dict and not isinstance(batch, Mapping):
        return None
    known = batch.get("num_tokens")
    if isinstance(known, int):
        return known
    labels = batch.get("labels")
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.ndim < 2:
        return None
    return labels.ne(IGNORE_INDEX).sum()


def owned(value: Any) -> Any:
    """A detached copy of a tensor, or of each in a tuple or list; anything else unchanged."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) is tuple or type(value) is list:
        return type(value)(owned(part) for part in value)
    return value


def as_scalar(value: Scalar, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`value` as a tensor on the device; a number is moved by a fill, which the host need not wait for."""
    if isinstance(value, Tensor):
        return value.to(device=device, dtype=dtype)
    return torch.full((), value, dtype=dtype, device=device)
