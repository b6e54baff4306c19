"""What happened since the last logged step, kept on the device and read once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from onstep.training.losses import StepLoss, Weight, as_scalar, at_least_one

_FOLD_EVERY = 64


@dataclass
class IntervalReport:
    """Plain numbers of the steps since the last report."""

    num_steps: int
    num_skipped: int
    num_losses: int
    """Steps that the mean is taken over: all but those that an anomaly left out."""
    loss: float
    """Mean of the steps' losses; NaN where every step was left out."""
    grad_norm: float | None
    """Root mean square of the steps' gradient norms."""
    max_grad_norm: float | None
    tokens: int | None
    """Labels trained on, over all ranks."""
    num_zeros: int | None = None
    """Zeros among the gradients of the last step that counted them."""
    others: dict[str, float] = field(default_factory=dict)
    """Mean of every further loss that the forward step reported, over the steps that reported it."""


class IntervalMeter:
    """Takes up each step's loss and gradient norm without reading the device.

    A step costs two list appends; every 64 steps the lists are folded into running sums on the device. The one read
    happens in `flush`.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.num_steps = 0
        self.num_skipped = 0
        self._num_losses = 0
        self._losses: list[StepLoss] = []
        self._norms: list[Weight] = []
        self._num_norms = 0
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}
        self._max_norm: Tensor | None = None
        self._num_zeros: Weight | None = None

    def add(
        self, step_loss: StepLoss | None, grad_norm: Weight | None, successful: bool, num_zeros: Weight | None = None
    ) -> None:
        """Take up one step; norm and zeros may be plain numbers, as other optimizers give them.

        None is a step that an anomaly left out: it has a record of its own, and no part in the mean.
        """
        self.num_steps += 1
        self.num_skipped += not successful
        if step_loss is None:
            return
        self._num_losses += 1
        self._losses.append(step_loss)
        if num_zeros is not None:
            self._num_zeros = num_zeros
        if grad_norm is not None:
            self._norms.append(grad_norm)
        if len(self._losses) >= _FOLD_EVERY:
            self._fold()

    def flush(self) -> IntervalReport | None:
        """Everything since the last flush, read from the device at once; None when there was no step."""
        if self.num_steps == 0:
            return None
        self._fold()
        names = list(self._sums)
        values = [self._sums[name].double() for name in names]
        if self._max_norm is not None:
            values.append(self._max_norm.double())
        zeros = self._num_zeros
        if isinstance(zeros, Tensor):
            values.append(zeros.double().to(values[0].device if values else zeros.device))
        numbers = torch.stack(values).tolist() if values else []
        if isinstance(zeros, Tensor):
            zeros = numbers.pop()
        sums = dict(zip(names, numbers, strict=False))
        report = self._report(sums, numbers[-1] if self._max_norm is not None else None)
        report.num_zeros = None if zeros is None else int(zeros)
        self.reset()
        return report

    def tokens_so_far(self) -> int:
        """Labels trained on since the last flush, read from the device; nothing is folded or forgotten."""
        folded = [self._sums["tokens"]] if "tokens" in self._sums else []
        waiting = [loss.tokens for loss in self._losses if loss.tokens is not None]
        if not folded and not waiting:
            return 0
        device = self._losses[0].numerator.device if self._losses else folded[0].device
        return round(float(_stack([*folded, *waiting], device).sum()))

    def state_dict(self) -> dict[str, Any]:
        """Everything since the last flush, as it is: folding it now would change the last bits of the mean."""
        return {
            "num_steps": self.num_steps,
            "num_skipped": self.num_skipped,
            "num_losses": self._num_losses,
            "numerators": _packed([loss.numerator for loss in self._losses]),
            "weights": _packed([loss.weight for loss in self._losses]),
            "tokens": _packed([loss.tokens for loss in self._losses]),
            "reports": [list(loss.reports) for loss in self._losses],
            "report_values": _packed([value for loss in self._losses for value in loss.reports.values()]),
            "norms": _packed(self._norms),
            "num_norms": self._num_norms,
            "sums": dict(self._sums),
            "counts": dict(self._counts),
            "max_norm": self._max_norm,
            "num_zeros": self._num_zeros,
        }

    def load_state_dict(self, state_dict: dict[str, Any], device: torch.device | None = None) -> None:
        """Continue the interval of a checkpoint, with its tensors on `device`."""
        device = device or torch.device("cpu")
        columns = [_unpacked(state_dict[name], device) for name in ("numerators", "weights", "tokens")]
        values = iter(_unpacked(state_dict["report_values"], device))
        self.reset()
        self.num_steps, self.num_skipped = state_dict["num_steps"], state_dict["num_skipped"]
        self._num_losses = state_dict["num_losses"]
        for (numerator, weight, tokens), names in zip(zip(*columns, strict=True), state_dict["reports"], strict=True):
            self._losses.append(StepLoss(numerator, weight, tokens, {name: next(values) for name in names}))
        self._norms = _unpacked(state_dict["norms"], device)
        self._num_norms = state_dict["num_norms"]
        self._sums = {name: value.to(device) for name, value in state_dict["sums"].items()}
        self._counts = dict(state_dict["counts"])
        max_norm = state_dict["max_norm"]
        self._max_norm = None if max_norm is None else max_norm.to(device)
        zeros = state_dict.get("num_zeros")  # older checkpoints have none
        self._num_zeros = zeros.to(device) if isinstance(zeros, Tensor) else zeros

    def _report(self, sums: dict[str, float], max_norm: float | None) -> IntervalReport:
        steps = self.num_steps
        others = {name: sums[f"report/{name}"] / count for name, count in self._counts.items()}
        return IntervalReport(
            num_steps=steps,
            num_skipped=self.num_skipped,
            num_losses=self._num_losses,
            loss=sums["loss"] / self._num_losses if self._num_losses else math.nan,
            grad_norm=(sums["squared_norm"] / self._num_norms) ** 0.5 if self._num_norms else None,
            max_grad_norm=max_norm,
            tokens=round(sums["tokens"]) if "tokens" in sums else None,
            others=others,
        )

    def _fold(self) -> None:
        if not self._losses:
            return
        device = self._losses[0].numerator.device
        top = torch.stack([loss.numerator for loss in self._losses])
        weights = _stack([at_least_one(loss.weight) for loss in self._losses], device)
        self._grow("loss", (top / weights.to(top.dtype)).double().sum())
        tokens = [loss.tokens for loss in self._losses if loss.tokens is not None]
        if tokens:
            self._grow("tokens", _stack(tokens, device).sum())
        for key in dict.fromkeys(key for loss in self._losses for key in loss.reports):
            values = [loss.reports[key] for loss in self._losses if key in loss.reports]
            self._grow(f"report/{key}", _stack(values, device).sum())
            self._counts[key] = self._counts.get(key, 0) + len(values)
        if self._norms:
            norms = _stack(self._norms, device)
            self._grow("squared_norm", norms.square().sum())
            self._num_norms += len(self._norms)
            largest = norms.max()
            self._max_norm = largest if self._max_norm is None else torch.maximum(self._max_norm, largest)
        self._losses, self._norms = [], []

    def _grow(self, name: str, amount: Tensor) -> None:
        self._sums[name] = self._sums[name] + amount if name in self._sums else amount


def _packed(values: Sequence[Any]) -> Any:
    """A list of 0-d tensors of one type as one tensor; any other list as it is."""
    if values and all(isinstance(one, Tensor) and one.ndim == 0 and one.dtype == values[0].dtype for one in values):
        return torch.stack(list(values))
    return list(values)


def _unpacked(packed: Any, device: torch.device) -> list[Any]:
    if isinstance(packed, Tensor):
        return list(packed.to(device).unbind())
    return [one.to(device) if isinstance(one, Tensor) else one for one in packed]


def _stack(numbers: Sequence[Weight], device: torch.device) -> Tensor:
    """Host and device numbers as one float64 vector on the device, without waiting for it."""
    if any(isinstance(number, Tensor) for number in numbers):
        return torch.stack([as_scalar(number, torch.float64, device) for number in numbers])
    vector = torch.tensor(numbers, dtype=torch.float64)
    return vector.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else vector.to(device)
