"""Estimates the memory that training needs on each device from the configuration alone."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass, replace
from typing import Any

from onstep.errors import ConfigError
from onstep.metrics.model_shape import (
    ModelShape,
    num_expert_matrix_parameters,
    num_layer_matrix_parameters,
    num_lora_parameters,
    num_parameters,
)

_FLOAT32 = 4
_MIB = 1024**2


@dataclass(frozen=True)
class MemoryEstimate:
    """Estimated bytes on one device."""

    num_parameters: int
    """Number of parameters, including those added by LoRA."""
    num_trainable: int
    """Number of trainable ones: with LoRA those that it adds, else all."""
    weights: int
    gradients: int
    """Gradients of trainable parameters."""
    optimizer: int
    """Optimizer state of trainable parameters."""
    weight_copies: int
    """The 16-bit copies of matrices that autocast creates for a forward and backward pass; 0 in float32."""
    activations: int
    """Activations of one micro-batch (of one sample, if its size is not set) when its backward pass begins: what its
    layers keep, plus logits, loss and their gradients."""

    @property
    def weights_and_optimizer(self) -> int:
        """Weights, gradients and optimizer state: the memory held between steps."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """Sum of all components."""
        return self.weights_and_optimizer + self.weight_copies + self.activations


def check_memory(cfg: Any) -> None:
    """Refuse a model whose weights, or on a CPU whose training, cannot fit into the memory of this machine.

    Raises:
        ConfigError: naming the sizes, the memory needed and the memory there is.
    """
    given, model = cfg.model, copy.copy(cfg.model)
    model.vocab_size = model.vocab_size or cfg.tokenizer.vocab_size or 1
    cfg = replace(cfg, model=model)
    estimate, there = estimate_training_memory(cfg), _machine_bytes()
    if estimate is None or there is None:
        return
    sizes = ", ".join(f"model.{name}={getattr(given, name)}" for name in _SIZES if getattr(given, name))
    has = f"this machine has {there / 2**30:,.0f} GiB of memory"
    if estimate.weights > there:
        raise ConfigError(
            f"{sizes} make a model of {estimate.num_parameters:,} parameters, whose weights are "
            f"{estimate.weights / 2**30:,.0f} GiB; {has}. Lower the sizes."
        )
    if cfg.dist.device == "cpu" and estimate.total > _ROUGHLY * there:
        raise ConfigError(
            f"train.micro_batch_size={cfg.train.micro_batch_size}, model.seq_length={model.seq_length}, {sizes} "
            f"require about {estimate.total / 2**30:,.0f} GiB; {has}. Lower them."
        )


_SIZES = ("num_layers", "hidden_size", "ffn_hidden_size", "num_moe_experts", "moe_ffn_hidden_size", "vocab_size")
"""What the number of parameters follows from."""
_ROUGHLY = 1.5
"""How far an estimate with activations may be off."""


def _machine_bytes() -> int | None:
    """The memory of this machine; None where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def estimate_training_memory(cfg: Any) -> MemoryEstimate | None:
    """Memory needed per device to train with a `ConfigContainer`; None for a model without a known formula.

    Weights, gradients and optimizer state are exact: float32 weights (also under autocast) and, for each trainable
    parameter, a 4-byte gradient and 8 bytes of Adam's moments or 4 of SGD's momentum; Muon has 4 for the matrices of
    layers and Adam's 8 for the rest, including stacked experts. Every rank holds all of it. Activations are an estimate
    that assumes attention does not store scores; with `model.recompute_granularity` full, a layer only keeps its input.
    Buffers of data parallelism, memory fragmentation and the kernels' workspace come on top.

    Source: the method of Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models"
        (arXiv:2205.05198), section 4.1, for the layers of the built-in transformer: see `_layer_bytes`.
    """
    shape = ModelShape.of(cfg.model)
    if shape is None:
        return None
    base = num_parameters(shape)
    peft: Any = getattr(cfg, "peft", None)
    added = 0
    if is_lora := peft is not None and peft.peft_scheme is not None:
        added = num_lora_parameters(shape, peft.dim, peft.target_modules)
    trainable = added if is_lora else base
    layer_matrices = num_layer_matrix_parameters(shape)
    all_matrices = layer_matrices + num_expert_matrix_parameters(shape) + shape.hidden_size * shape.vocab_size + added
    is_mixed = cfg.mixed_precision is not None
    return MemoryEstimate(
        num_parameters=base + added,
        num_trainable=trainable,
        weights=_FLOAT32 * (base + added),
        gradients=_FLOAT32 * trainable,
        optimizer=_optimizer_bytes(cfg.optimizer, trainable, added if is_lora else layer_matrices),
        weight_copies=2 * all_matrices if is_mixed else 0,
        activations=_activation_bytes(shape, cfg, is_mixed),
    )


def format_training_memory_estimate(estimate: MemoryEstimate) -> str:
    """Format the estimate as a table in MiB, one line per component, omitting those that are 0."""
    lines = [f"{'parameters':<14}{estimate.num_parameters:>16,d}"]
    if estimate.num_trainable != estimate.num_parameters:
        lines.append(f"{'trained':<14}{estimate.num_trainable:>16,d}")
    rows = {
        "weights": estimate.weights,
        "gradients": estimate.gradients,
        "optimizer": estimate.optimizer,
        "16-bit copies": estimate.weight_copies,
        "activations": estimate.activations,
        "total": estimate.total,
    }
    return "\n".join([*lines, *(f"{name:<14}{size / _MIB:>12,.1f} MiB" for name, size in rows.items() if size)])


def report_theoretical_memory(cfg: Any) -> None:
    """Print Megatron Bridge's line about weights, gradients and optimizer; nothing if no formula is known."""
    estimate = estimate_training_memory(cfg)
    if estimate is not None:
        line = f"Theoretical memory footprints: weight and optimizer={estimate.weights_and_optimizer / _MIB:.2f} MB"
        print(line, flush=True)  # noqa: T201 - printing is the function's purpose


def _optimizer_bytes(optimizer: Any, trainable: int, matrices: int) -> int:
    """Bytes of optimizer state for `trainable` weights, of which `matrices` are in matrices of layers."""
    if optimizer.optimizer == "sgd":
        return _FLOAT32 * trainable if optimizer.sgd_momentum else 0
    if optimizer.optimizer == "muon":
        return _FLOAT32 * matrices + 2 * _FLOAT32 * (trainable - matrices)
    return 2 * _FLOAT32 * trainable


def _activation_bytes(shape: ModelShape, cfg: Any, is_mixed: bool) -> int:
    """Bytes of activations when the backward pass begins."""
    places: int = shape.seq_length * (cfg.train.micro_batch_size or 1)
    layers = [_layer_bytes(shape, is_mixed, has_experts=False)] * shape.num_dense_layers
    layers += [_layer_bytes(shape, is_mixed, has_experts=True)] * shape.num_moe_layers
    # the logits in the dtype of the matrices and in float32, and their log-softmax, whose gradient replaces the former
    logits = (10 if is_mixed else 8) * shape.vocab_size * (1 + shape.mtp_depth)
    ends = 12 * shape.hidden_size + logits
    if getattr(cfg.model, "recompute_granularity", None) == "full":
        return places * (_FLOAT32 * shape.hidden_size * len(layers) + max(ends, *layers))
    return places * (sum(layers) + ends)


def _layer_bytes(shape: ModelShape, is_mixed: bool, has_experts: bool) -> int:
    """Bytes that a layer keeps per token: inputs and outputs of both norms in float32 and (mixed) in the dtype of the
    matrices, queries, keys, values, the attention output twice, and each factor of the feed-forward products."""
    hidden, width = shape.hidden_size, shape.ffn_hidden_size
    per_element = 2 if is_mixed else _FLOAT32
    attention = (24 if is_mixed else 20) * hidden + per_element * (3 * shape.query_width + 2 * shape.key_width)
    factors = 4 if shape.num_projections == 3 else 2
    if not has_experts:
        return attention + per_element * factors * width
    width = shape.moe_ffn_hidden_size * shape.moe_topk + shape.shared_expert_size
    sent = 2 * shape.moe_topk * hidden  # a token's input to each of its experts, and each one's output
    return attention + per_element * (factors * width + sent) + 3 * _FLOAT32 * shape.num_experts
