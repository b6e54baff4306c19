"""Accumulates losses and gradient norms since the last logged step on the device, and reads them once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor

from onstep.training.compute.loss_sums import StepLoss
from onstep.training.compute.losses import Scalar, as_scalar
from onstep.training.protocols import StateDict

Name = TypeVar("Name")
_FOLD_EVERY = 64
_MAX_NORM, _ZEROS = "max_norm", "num_zeros"
_FORM = attrgetter("dtype", "device")


@dataclass
class IntervalReport:
    """Python numbers for the steps since the last report."""

    num_steps: int
    num_skipped: int
    num_losses: int
    """Number of steps in the mean: all except those that an anomaly skipped."""
    loss: float
    """Mean of the steps' losses; NaN if every step was skipped."""
    grad_norm: float | None
    """Root mean square of the steps' gradient norms."""
    max_grad_norm: float | None
    tokens: int | None
    """Number of labels trained on, over all ranks."""
    num_zeros: int | None = None
    """Zeros in the gradients of the last step that counted them."""
    others: dict[str, float] = field(default_factory=dict)
    """Mean of every additional loss that the forward step reported, over the steps that reported it."""
    applied: dict[str, float] = field(default_factory=dict)
    """Mean of every loss over the steps whose update was applied: the losses that the forward step reported, else
    `lm loss`."""
    extras: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The extras passed to `read`, as Python numbers."""


class LossAccumulator:
    """Accumulates each step's loss and gradient norm without reading the device.

    A step costs two list appends; every 64 steps the lists are folded into running sums on the device. The only read
    happens in `read`, or otherwise in `flush`.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Discard everything."""
        self.num_steps = 0
        self.num_skipped = 0
        self._num_losses = 0
        self._losses: list[StepLoss] = []
        self._unapplied: set[int] = set()
        """Indices of the losses of steps whose update was not applied."""
        self._norms: list[Scalar] = []
        self._num_norms = 0
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}
        self._max_norm: Tensor | None = None
        self._num_zeros: Scalar | None = None
        self._report: IntervalReport | None = None

    def add(
        self, step_loss: StepLoss | None, grad_norm: Scalar | None, successful: bool, num_zeros: Scalar | None = None
    ) -> None:
        """Add one step; norm and zeros may be Python numbers, as other optimizers return them.

        None stands for a step that an anomaly skipped: it has its own record, and does not enter the mean.
        """
        self.num_steps += 1
        self.num_skipped += not successful
        if step_loss is None:
            return
        self._num_losses += 1
        if not successful:
            self._unapplied.add(len(self._losses))
        self._losses.append(step_loss)
        if num_zeros is not None:
            self._num_zeros = num_zeros
        if grad_norm is not None:
            self._norms.append(grad_norm)
        if len(self._losses) >= _FOLD_EVERY:
            self._fold()

    def read(self, **extras: Mapping[str, object]) -> IntervalReport | None:
        """Everything since the last flush, read from the device at once; None without a step.

        Without a step in between, a second call reads nothing and returns the first one's report.

        Args:
            **extras: additional numbers and tensors of one element to read along with the others.
        """
        if self.num_steps == 0:
            return None
        if self._report is None or self._report.num_steps != self.num_steps:
            self._fold()
            unread: dict[Any, object] = {**self._sums, _MAX_NORM: self._max_norm, _ZEROS: self._num_zeros}
            for group, values in extras.items():
                for name, one in values.items():
                    unread[group, name] = one
            read = read_together(unread)
            self._report = self._make_report(read)
            for group, values in extras.items():
                self._report.extras[group] = {name: read[group, name] for name in values}
        return self._report

    def flush(self) -> IntervalReport | None:
        """The same as `read`, then reset: the next interval begins."""
        report = self.read()
        self.reset()
        return report

    def tokens_so_far(self) -> int:
        """Labels trained on since the last flush, read from the device; nothing is folded or discarded."""
        folded = [self._sums["tokens"]] if "tokens" in self._sums else []
        waiting = [loss.tokens for loss in self._losses if loss.tokens is not None]
        if not folded and not waiting:
            return 0
        device = self._losses[0].numerator.device if self._losses else folded[0].device
        return round(float(_stack([*folded, *waiting], device).sum()))

    def state_dict(self) -> StateDict:
        """Everything since the last flush, unfolded: folding now would change the last bits of the mean."""
        return {
            "num_steps": self.num_steps,
            "num_skipped": self.num_skipped,
            "num_losses": self._num_losses,
            "numerators": _packed([loss.numerator for loss in self._losses]),
            "weights": _packed([loss.weight for loss in self._losses]),
            "tokens": _packed([loss.tokens for loss in self._losses]),
            "unapplied": sorted(self._unapplied),
            "reports": [list(loss.reports) for loss in self._losses],
            "report_values": _packed([value for loss in self._losses for value in loss.reports.values()]),
            "norms": _packed(self._norms),
            "num_norms": self._num_norms,
            "sums": dict(self._sums),
            "counts": dict(self._counts),
            "max_norm": self._max_norm,
            "num_zeros": self._num_zeros,
        }

    def load_state_dict(self, state_dict: StateDict, device: torch.device | None = None) -> None:
        """Continue the interval of a checkpoint, with its tensors on `device`."""
        device = device or torch.device("cpu")
        columns = [_unpacked(state_dict[name], device) for name in ("numerators", "weights", "tokens")]
        values = iter(_unpacked(state_dict["report_values"], device))
        self.reset()
        self.num_steps, self.num_skipped = state_dict["num_steps"], state_dict["num_skipped"]
        self._num_losses = state_dict["num_losses"]
        for (numerator, weight, tokens), names in zip(zip(*columns, strict=True), state_dict["reports"], strict=True):
            self._losses.append(StepLoss(numerator, weight, tokens, {name: next(values) for name in names}))
        self._unapplied = set(state_dict.get("unapplied", ()))  # missing in older checkpoints
        self._norms = _unpacked(state_dict["norms"], device)
        self._num_norms = state_dict["num_norms"]
        self._sums = {name: value.to(device) for name, value in state_dict["sums"].items()}
        self._counts = dict(state_dict["counts"])
        max_norm = state_dict["max_norm"]
        self._max_norm = None if max_norm is None else max_norm.to(device)
        zeros = state_dict.get("num_zeros")  # missing in older checkpoints
        self._num_zeros = zeros.to(device) if isinstance(zeros, Tensor) else zeros

    def _make_report(self, read: Mapping[Any, Any]) -> IntervalReport:
        """The report of what was read: sums, largest norm and zeros by name."""
        num_zeros, num_applied = read[_ZEROS], self.num_steps - self.num_skipped
        others, applied = dict[str, float](), dict[str, float]()
        for name, count in self._counts.items():
            others[name] = read[f"report/{name}"] / count
        for name in (others or ("lm loss",)) if num_applied else ():
            key = f"report/{name}" if others else "loss"
            applied[name] = read.get(f"applied/{key}", read.get(key, 0.0)) / num_applied
        return IntervalReport(
            num_steps=self.num_steps,
            num_skipped=self.num_skipped,
            num_losses=self._num_losses,
            loss=read["loss"] / self._num_losses if self._num_losses else math.nan,
            grad_norm=(read["squared_norm"] / self._num_norms) ** 0.5 if self._num_norms else None,
            max_grad_norm=read[_MAX_NORM],
            tokens=round(read["tokens"]) if "tokens" in read else None,
            num_zeros=None if num_zeros is None else int(num_zeros),
            others=others,
            applied=applied,
        )

    def _fold(self) -> None:
        if not self._losses:
            return
        numerators, weights, tokens = list[Tensor](), list[Scalar](), list[Scalar]()
        reports: dict[str, tuple[list[int], list[Scalar]]] = {}
        for step, loss in enumerate(self._losses):
            numerators.append(loss.numerator)
            weights.append(loss.weight)
            if loss.tokens is not None:
                tokens.append(loss.tokens)
            for name, value in loss.reports.items():
                steps, values = reports.setdefault(name, ([], []))
                steps.append(step)
                values.append(value)
        device, top, amounts = numerators[0].device, torch.stack(numerators), dict[str, Tensor]()
        bottom = _stack(weights, device).clamp(min=1)  # a step without any labels has a loss of zero, not NaN
        self._add_losses(amounts, "loss", (top / bottom.to(top.dtype)).double(), range(len(numerators)))
        if tokens:
            amounts["tokens"] = _stack(tokens, device).sum()
        for name, (steps, values) in reports.items():
            self._add_losses(amounts, f"report/{name}", _stack(values, device), steps)
            self._counts[name] = self._counts.get(name, 0) + len(steps)
        if self._norms:
            norms = _stack(self._norms, device)
            amounts["squared_norm"] = norms.square().sum()
            self._num_norms += len(self._norms)
            largest = norms.max()
            self._max_norm = largest if self._max_norm is None else torch.maximum(self._max_norm, largest)
        for name, amount in amounts.items():
            self._sums[name] = self._sums[name] + amount if name in self._sums else amount
        self._losses, self._norms, self._unapplied = [], [], set()

    def _add_losses(self, amounts: dict[str, Tensor], name: str, values: Tensor, steps: Sequence[int]) -> None:
        """Add the losses of some pending steps; count the applied ones separately once a step was not applied."""
        applied = f"applied/{name}"
        if self._unapplied or applied in self._sums:
            rows = [row for row, step in enumerate(steps) if step not in self._unapplied]
            amounts[applied] = values[rows].sum()
            if applied not in self._sums and name in self._sums:
                self._sums[applied] = self._sums[name]  # all of them until now
        amounts[name] = values.sum()


def read_together(values: Mapping[Name, object]) -> dict[Name, Any]:
    """`values` with tensors of one element as Python numbers, read from the device at once."""
    tensors: dict[Name, Tensor] = {}
    device = torch.device("cpu")
    for name, value in values.items():
        if isinstance(value, Tensor):
            tensors[name] = value
            device = value.device if device.type == "cpu" else device
    if not tensors:
        return dict(values)
    numbers = torch.stack([one.detach().to(device).double().reshape(()) for one in tensors.values()]).tolist()
    return {**values, **dict(zip(tensors, numbers, strict=True))}


def _packed(values: Sequence[Scalar | None]) -> Tensor | list[Scalar | None]:
    """A list of 0-d tensors of one type as one tensor; any other list unchanged."""
    tensors = [one for one in values if isinstance(one, Tensor) and one.ndim == 0]
    is_packed = len(tensors) == len(values) and len({one.dtype for one in tensors}) == 1
    return torch.stack(tensors) if is_packed else list(values)


def _unpacked(packed: Tensor | list[Scalar | None], device: torch.device) -> list[Any]:
    if isinstance(packed, Tensor):
        return list(packed.to(device).unbind())
    return [one.to(device) if isinstance(one, Tensor) else one for one in packed]


def _stack(numbers: Sequence[Scalar], device: torch.device) -> Tensor:
    """Host and device numbers as one float64 vector on the device, without waiting for it."""
    kinds = set(map(type, numbers))
    if kinds == {Tensor} and len(set(map(_FORM, numbers))) == 1:
        return torch.stack(list(numbers)).to(device, torch.float64)  # type: ignore[arg-type]
    if any(issubclass(kind, Tensor) for kind in kinds):
        return torch.stack([as_scalar(number, torch.float64, device) for number in numbers])
    vector = torch.tensor(numbers, dtype=torch.float64)
    return vector.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else vector.to(device)
