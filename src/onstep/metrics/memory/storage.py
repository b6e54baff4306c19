"""Derives from a configuration how many bytes training holds for each weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from onstep.metrics.memory.counts import WeightCounts

FLOAT32, HALF = 4, 2


@dataclass(frozen=True)
class Storage:
    """Bytes of each weight, by what they are for."""

    trained: int
    frozen: int
    """Of frozen weights that are not quantized."""
    quantization: str | None
    """The type of the matrices of a frozen base: nf4 or int8; None is `frozen`."""
    masters: int
    """What the optimizer keeps of the values of trained weights, beyond the weights themselves."""
    gradients: int
    moments: int
    """Of each value in the optimizer's state that is not quantized."""
    product: int
    """Of the results of matrix products."""
    residual: int
    """Of the residual stream."""
    casts_inputs: bool
    """Whether autocast casts the results of norms, once for each product."""
    has_fused_norms: bool
    """Whether one kernel computes a norm, as on a GPU."""

    @classmethod
    def of(cls, cfg: Any, device: str | None = None) -> Storage:
        """What a `ConfigContainer` implies on a device, by default that of the configuration, else cuda."""
        is_mixed = cfg.mixed_precision is not None
        return cls(
            trained=FLOAT32,
            frozen=FLOAT32,
            quantization=None,
            masters=0,
            gradients=FLOAT32,
            moments=FLOAT32,
            product=HALF if is_mixed else FLOAT32,
            residual=FLOAT32,
            casts_inputs=is_mixed,
            has_fused_norms=(device or cfg.dist.device or "cuda").startswith("cuda"),
        )

    def frozen_bytes(self, counts: WeightCounts) -> int:
        """Bytes of all frozen weights."""
        if self.quantization is None:
            return self.frozen * counts.frozen
        return self.frozen * (counts.frozen - counts.in_matrices) + counts.quantized_bytes(self.quantization)

    def casts(self, weight: int) -> bool:
        """Whether autocast casts weights of this size for each product."""
        return weight > self.product


def optimizer_bytes(optimizer: Any, counts: WeightCounts, size: int) -> int:
    """Bytes of the optimizer's state, with `size` bytes for each of its values.

    Adam has two for each trained weight, SGD one with momentum; Muon one for the matrices of layers (of LoRA's weights,
    for all), and two as Adam for the rest.
    """
    trained = counts.trained
    if optimizer.optimizer == "sgd":
        return size * trained if optimizer.sgd_momentum else 0
    if optimizer.optimizer == "muon":
        return size * (2 * trained - (counts.added or counts.muon))
    return 2 * size * trained
