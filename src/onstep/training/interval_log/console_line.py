"""Formats Megatron Bridge's console line of a logged step, byte for byte."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from onstep.training.run import Run


@dataclass(frozen=True)
class IntervalValues:
    """The values of an interval that the line shows, as Python numbers; None omits the field."""

    learning_rate: float | None
    losses: Mapping[str, float]
    """Means over the interval; a negative or NaN mean is not shown."""
    last: Mapping[str, float | None]
    """`StepValues.shown` of the last step."""
    num_skipped: int
    num_nan: int


def console_line(
    state: Run,
    batch_size: int,
    info: IntervalValues,
    seconds_per_step: float,
    teraflops: float | None = None,
    energy: tuple[float, float] | None = None,
) -> str:
    """Format an interval's line; `teraflops` is TFLOP/s per device, `energy` a GPU's joules per step and watts."""
    progress, last = state.train_state, info.last
    joules, watts = energy or (None, None)
    num_zeros = last["num_zeros"]
    when = datetime.fromtimestamp(state.clock.wall())
    fields: list[str | None] = [
        f" [{when:%Y-%m-%d %H:%M:%S}] iteration {progress.step:8d}/{state.train_iters or 0:8d}",
        f" consumed samples: {progress.consumed_train_samples:12d}",
        _given(" skipped samples: {:12d}", progress.skipped_train_samples or None),
        f" elapsed time per iteration (ms): {seconds_per_step * 1000:.1f}",
        _given(" throughput per GPU (TFLOP/s/GPU): {:.1f}", teraflops),
        _given(" energy per GPU (J/iter/GPU): {:.1f}", joules),
        _given(" power per GPU (W/GPU): {:.1f}", watts),
        _given(" learning rate: {:.6E}", info.learning_rate),
        f" global batch size: {batch_size:5d}",
        *(f" {name}: {mean:.6E}" for name, mean in info.losses.items() if mean >= 0),
        f" loss scale: {last['loss_scale']:.1f}",
        _given(" grad norm: {:.3f}", last["grad_norm"]),
        _given(" num zeros: {}", None if num_zeros is None else int(num_zeros)),
        _given(" params norm: {:.3f}", last["params_norm"]),
        _given(" max attention logit: {:.3f}", last["max_attention_logit"]),
        f" number of skipped iterations: {info.num_skipped:3d}",
        f" number of nan iterations: {info.num_nan:3d}",
    ]
    return "".join(f"{one} |" for one in fields if one is not None)


def _given(form: str, value: float | None) -> str | None:
    return None if value is None else form.format(value)
