"""Derives from a configuration how many bytes training holds for each weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from onstep.config.sections.optimizer import OF_TORCHAO
from onstep.metrics.memory.counts import WeightCounts

FLOAT32, HALF = 4, 2


@dataclass(frozen=True)
class Storage:
    """Bytes of each weight and of each result, by what they are for."""

    trained: int
    frozen: int
    """Of frozen weights that are not quantized."""
    quantization: str | None
    """The type of the matrices of a frozen base: nf4 or int8; None is `frozen`."""
    masters: int
    """What the optimizer keeps of the values of trained weights, beyond the weights themselves."""
    gradients: int
    state: int
    """Of each value in the optimizer's state."""
    update: int
    """Of each weight in the part of them that is updated at once, while it is; 0 where it is updated in place."""
    product: int
    """Of the results of matrix products."""
    residual: int
    """Of the residual stream."""
    casts_inputs: bool
    """Whether the results of norms are cast, once for each product: by autocast, or by LoRA to its own type."""
    has_fused_norms: bool
    """Whether one kernel computes a norm, as on a GPU."""
    summed: int
    """Of each gradient in a sum over the ranks that divide updates."""
    summands: int
    """The copies of a gradient whose sum is in flight: what is sent and, on a CPU, what is received."""

    @classmethod
    def of(cls, cfg: Any, device: str | None = None) -> Storage:
        """What a `ConfigContainer` implies on a device, by default that of the configuration, else cuda."""
        optimizer, peft = cfg.optimizer, cfg.peft
        is_low, has_masters = (
            getattr(optimizer, "params_dtype", "") == "bfloat16",
            getattr(optimizer, "main_params_dtype", "") == "float32",
        )
        keeps_remainders = is_low and (has_masters or optimizer.rounding == "kahan")
        trained = HALF if is_low else FLOAT32
        frozen = HALF if is_low or cfg.mixed_precision == "bf16_mixed" else FLOAT32
        product = HALF if is_low or cfg.mixed_precision is not None else FLOAT32
        is_gpu = (device or cfg.dist.device or "cuda").startswith("cuda")
        return cls(
            trained=trained,
            frozen=frozen,
            quantization=peft.base_quantization if peft.peft_scheme is not None else None,
            masters=HALF if keeps_remainders else FLOAT32 if cfg.ddp.fp8_param_gather else 0,
            gradients=trained,
            state=_state_bytes(optimizer) if has_masters or not is_low else HALF,
            update=_update_bytes(optimizer) if is_low else 0,
            product=product,
            residual=trained if peft.peft_scheme is None else frozen,
            casts_inputs=product < trained,
            has_fused_norms=is_gpu,
            summed=HALF if cfg.ddp.grad_reduce_in_bf16 else FLOAT32 if cfg.ddp.grad_reduce_in_fp32 else trained,
            summands=1 if is_gpu else 2,
        )

    def frozen_bytes(self, counts: WeightCounts) -> int:
        """Bytes of all frozen weights."""
        if self.quantization is None:
            return self.frozen * counts.frozen
        return self.frozen * (counts.frozen - counts.in_matrices) + counts.quantized_bytes(self.quantization)

    def casts(self, weight: int) -> bool:
        """Whether autocast casts weights of this size for each product."""
        return weight > self.product


UPDATED_AT_ONCE = 3 * 2**20
"""Number of bfloat16 weights that are updated at once, at most: see `optim/low_precision.py`."""


def update_bytes(optimizer: Any, counts: WeightCounts, storage: Storage, parts: int) -> int:
    """Bytes that exist during an update only.

    Ranks that divide the updates exchange the matrices of Muon all at once: of its rows, a rank has the update, what it
    sends and gets in the type of the gradient, and the results of as many rows, those it sends and those it gets in
    that of the iteration. Of bfloat16 weights it has weights, gradients and state in float32 besides.

    Args:
        parts: the ranks that divide the updates.
        optimizer: the section of the configuration.
        counts: the numbers of weights.
        storage: their bytes.
    """
    if optimizer.optimizer != "muon" or parts == 1:
        return storage.update * min(counts.trained, UPDATED_AT_ONCE)
    iterates_in = FLOAT32 if optimizer.muon_fp32_matmul_prec == "highest" else HALF
    converted = 2 * FLOAT32 + 2 * (FLOAT32 - storage.state) if storage.update else 0
    return (3 * (FLOAT32 + iterates_in) + converted) * (counts.added or counts.muon) // parts


def _update_bytes(optimizer: Any) -> int:
    """Weight and gradient in float32, the bits that are rounded, and without masters the state in float32."""
    if optimizer.main_params_dtype == "float32":
        return 16
    return {"stochastic": 22, "kahan": 26, "nearest": 16}[optimizer.rounding]


def _state_bytes(optimizer: Any) -> int:
    """Bytes of a value of the state, the mean of AdamW's two."""
    types = [getattr(optimizer, name, "float32") for name in ("exp_avg_dtype", "exp_avg_sq_dtype")]
    return sum(HALF if one == "bfloat16" else FLOAT32 for one in types) // 2


def optimizer_bytes(optimizer: Any, counts: WeightCounts, size: int) -> int:
    """Bytes of the optimizer's state, with `size` bytes for each of its values.

    Adam has two for each trained weight, SGD one with momentum; Muon one for the matrices of layers (of LoRA's weights,
    for all), and two as Adam for the rest. Optimizers of 8 bits have two values of a byte each, and a scale of 4 bytes
    for every 256 of either; those of bitsandbytes have float32 values for an embedding that is trained.
    """
    trained, name = counts.trained, optimizer.optimizer
    if name == "sgd":
        return size * trained if optimizer.sgd_momentum else 0
    if name == "muon":
        return size * (2 * trained - (counts.added or counts.muon))
    if name.startswith("paged_"):
        return 0  # in memory that the driver moves to the host when the GPU has too little
    values = 1 if "lion" in name or "rmsprop" in name else 3 if "ademamix" in name else 2
    if "4bit" in name:
        return values * trained // 2 + values * FLOAT32 * -(-trained // _BLOCK_4BIT)
    if "8bit" in name:
        wide = 0 if counts.added or name in OF_TORCHAO else counts.in_embedding
        narrow = trained - wide
        return values * (narrow + FLOAT32 * (wide + -(-narrow // _BLOCK_8BIT)))
    return values * size * trained


_BLOCK_8BIT, _BLOCK_4BIT = 256, 128
