"""Megatron Bridge's console lines of a logged step, byte for byte."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime


@dataclass(frozen=True)
class LineFacts:
    """What the line says, as plain numbers; what is None has no field in it."""

    timestamp: float
    """Unix seconds; shown in local time."""
    step: int
    train_iters: int
    consumed_samples: int
    skipped_samples: int
    batch_size: int
    learning_rate: float | None
    losses: Mapping[str, float] = field(default_factory=dict)
    """Means over the interval; a negative or NaN one is not shown."""
    loss_scale: float = 1.0
    grad_norm: float | None = None
    num_zeros: int | float | None = None
    params_norm: float | None = None
    max_attention_logit: float | None = None
    num_skipped: int = 0
    num_nan: int = 0


def console_line(
    facts: LineFacts,
    seconds_per_step: float,
    teraflops: float | None = None,
    joules: float | None = None,
    watts: float | None = None,
) -> str:
    """The line of an interval; `teraflops` are TFLOP/s of one device, `joules` those of a step, `watts` the power."""
    when = datetime.fromtimestamp(facts.timestamp)
    fields: list[str | None] = [
        f" [{when:%Y-%m-%d %H:%M:%S}] iteration {facts.step:8d}/{facts.train_iters:8d}",
        f" consumed samples: {facts.consumed_samples:12d}",
        f" skipped samples: {facts.skipped_samples:12d}" if facts.skipped_samples > 0 else None,
        f" elapsed time per iteration (ms): {seconds_per_step * 1000:.1f}",
        _given(" throughput per GPU (TFLOP/s/GPU): {:.1f}", teraflops),
        _given(" energy per GPU (J/iter/GPU): {:.1f}", joules),
        _given(" power per GPU (W/GPU): {:.1f}", watts),
        _given(" learning rate: {:.6E}", facts.learning_rate),
        f" global batch size: {facts.batch_size:5d}",
        *(f" {name}: {mean:.6E}" for name, mean in facts.losses.items() if mean >= 0),
        f" loss scale: {facts.loss_scale:.1f}",
        _given(" grad norm: {:.3f}", facts.grad_norm),
        _given(" num zeros: {}", facts.num_zeros),
        _given(" params norm: {:.3f}", facts.params_norm),
        _given(" max attention logit: {:.3f}", facts.max_attention_logit),
        f" number of skipped iterations: {facts.num_skipped:3d}",
        f" number of nan iterations: {facts.num_nan:3d}",
    ]
    return "".join(f"{one} |" for one in fields if one is not None)


def step_time_line(seconds_per_step: float, teraflops: float) -> str:
    """The line of rank 0 about speed: seconds of a step, TFLOP/s of a device."""
    return f"Step Time : {seconds_per_step:.2f}s GPU utilization: {teraflops:.1f}MODEL_TFLOP/s/GPU"


def memory_line(rank: int, step: int, report: Mapping[str, int | float]) -> str:
    """The line about one rank's GPU memory."""
    return f"[Rank {rank}] (after {step} iterations) memory (GB)" + "".join(
        f" | {name}: {value}" for name, value in report.items()
    )


def _given(form: str, value: float | None) -> str | None:
    return None if value is None else form.format(value)
