"""Scales the loss of mixed precision, so that small gradients do not underflow in float16."""

from __future__ import annotations

import math
from typing import Any

from onstep.config import OptimizerConfig
from onstep.errors import CheckpointError, ConfigError

GROWTH = 2.0
BACKOFF = 0.5
LARGEST_SCALE = 2.0**96
"""Upper limit of the scale: its product with any weight of a loss, and its reciprocal, stay normal float32 numbers."""


class LossScaler:
    """Determines the factor by which the loss is multiplied before the backward pass.

    The scale doubles after `window` clean steps in a row. It halves, down to `min_scale`, with the `hysteresis`-th
    overflow and with every further one; only a doubling resets the count of overflows. A scale that cannot fall (at its
    minimum, or constant) has no overflows: non-finite values are then anomalies, which the finite gate handles. So is a
    non-finite loss, at any scale: the forward pass does not depend on the scale, so a lower one cannot help.

    The scale is a host number, and so are the arguments of `is_overflow`, which the caller reads from the device.

    Args:
        initial_scale: the initial scale.
        min_scale: smallest scale, > 0.
        window: clean steps after which the scale doubles; None disables this.
        hysteresis: number of overflows, since the start or the last doubling, from which the scale halves.

    Raises:
        ConfigError: if a value is out of range.

    Source: Micikevicius et al. 2018, "Mixed Precision Training" (arXiv:1710.03740), section 3.2.
    """

    def __init__(
        self,
        initial_scale: float = 2.0**32,
        *,
        min_scale: float = 1.0,
        window: int | None = 1000,
        hysteresis: int = 2,
    ) -> None:
        if not 0 < min_scale <= initial_scale <= LARGEST_SCALE:
            raise ConfigError(
                f"the loss scale must start at 2**96 or less and not below its minimum, which is > 0, got "
                f"{initial_scale} with the minimum {min_scale}; set optimizer.initial_loss_scale (or loss_scale) and "
                f"optimizer.min_loss_scale"
            )
        if hysteresis < 1 or (window is not None and window < 1):
            raise ConfigError(
                f"optimizer.loss_scale_window and optimizer.hysteresis must be >= 1, got {window} and {hysteresis}"
            )
        self.initial_scale, self.min_scale = initial_scale, min_scale
        self.window, self.hysteresis = window, hysteresis
        self.reset()

    @classmethod
    def constant(cls, scale: float) -> LossScaler:
        """A scale that never changes.

        Args:
            scale: the factor on the loss.
        """
        return cls(scale, min_scale=scale, window=None)

    @property
    def is_constant(self) -> bool:
        """Whether the scale can neither fall nor grow."""
        return self.window is None and self.scale <= self.min_scale

    def reset(self) -> None:
        """Start again at the initial scale."""
        self.scale = self.initial_scale
        self.clean_steps = 0
        """Steps without an overflow since the last overflow or doubling."""
        self.hysteresis_left = self.hysteresis
        """Overflows until the scale halves; at 1 or less, the next one halves it."""

    def is_overflow(self, norm: float, loss: float | None = None) -> bool:
        """Record one step, and return whether its gradients overflowed because the scale was too high.

        With a constant scale they never did. Ranks that pass the same values keep the same scale, without
        communication.

        Args:
            norm: norm of the scaled gradients, the same on all ranks.
            loss: the step's loss, the same on all ranks; None assumes that it is finite.
        """
        if self.is_constant:
            return False
        if math.isfinite(norm):
            self.clean_steps += 1
            if self.window is not None and self.clean_steps >= self.window:
                self.clean_steps = 0
                self.hysteresis_left = self.hysteresis
                if self.scale * GROWTH <= LARGEST_SCALE:
                    self.scale *= GROWTH
            return False
        if loss is not None and not math.isfinite(loss):
            return False
        self.clean_steps = 0
        if self.scale <= self.min_scale:
            return False
        self.hysteresis_left = max(self.hysteresis_left - 1, 0)
        if self.hysteresis_left == 0:
            self.scale = max(self.scale * BACKOFF, self.min_scale)
        return True

    def state_dict(self) -> dict[str, Any]:
        """The scale and its two counters, as Python numbers."""
        return {"scale": self.scale, "clean_steps": self.clean_steps, "hysteresis_left": self.hysteresis_left}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue another scaler's state, within the current limits; a constant scale does not change.

        Args:
            state_dict: what `state_dict()` returned.

        Raises:
            CheckpointError: if a key is missing, or a value is invalid.
        """
        scale, clean_steps = state_dict.get("scale"), state_dict.get("clean_steps")
        hysteresis_left = state_dict.get("hysteresis_left")
        is_scale = isinstance(scale, float) and 0 < scale <= LARGEST_SCALE
        if not is_scale or not all(isinstance(count, int) and count >= 0 for count in (clean_steps, hysteresis_left)):
            raise CheckpointError(
                f"The state of a loss scaler must have a scale between 0 and 2**96 and two counts, got {state_dict}; "
                f"resume from another checkpoint, or omit the state to start at the initial scale."
            )
        if self.window is None:
            return
        self.scale = max(state_dict["scale"], self.min_scale)
        self.clean_steps = state_dict["clean_steps"]
        self.hysteresis_left = min(state_dict["hysteresis_left"], self.hysteresis)


def build_loss_scaler(config: OptimizerConfig, mixed_precision: str | None) -> LossScaler | None:
    """The configured loss scaler.

    float16 has a dynamic scale, or a constant one with `loss_scale`; bfloat16 has a scale only with `loss_scale`, and
    float32 has none, as in Megatron-Core.

    Args:
        config: the section `optimizer` of a configuration.
        mixed_precision: that key of the run: `fp16_mixed`, `bf16_mixed`, or None for float32.

    Raises:
        ConfigError: if the scale starts below its minimum or above 2**96.
    """
    if config.loss_scale is not None and mixed_precision in ("fp16_mixed", "bf16_mixed"):
        return LossScaler.constant(config.loss_scale)
    if mixed_precision != "fp16_mixed":
        return None
    return LossScaler(
        config.initial_loss_scale,
        min_scale=config.min_loss_scale,
        window=config.loss_scale_window,
        hysteresis=config.hysteresis,
    )
