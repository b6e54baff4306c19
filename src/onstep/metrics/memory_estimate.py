"""What a training will need of each device's memory, from its configuration alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from onstep.metrics.model_shape import ModelShape

_FLOAT32 = 4
_MIB = 1024**2


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one device."""

    num_parameters: int
    weights: int
    gradients: int
    optimizer: int
    """State of the optimizer."""
    activations: int
    """What the forward pass of one micro-batch (of one sample, where its size is not set) keeps for the backward pass,
    without recomputation."""

    @property
    def weights_and_optimizer(self) -> int:
        """Weights, gradients and optimizer state: what is there between steps."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights_and_optimizer + self.activations


def estimate_training_memory(cfg: Any) -> MemoryEstimate | None:
    """What training by a `ConfigContainer` needs of each device; None for a model that no formula is known for.

    Weights, gradients and optimizer state are exact: float32 weights (autocast keeps them) and gradients of 4 bytes
    each, and 8 bytes of Adam's moments or 4 of SGD's momentum for each parameter; replicated on each rank. Activations
    are an estimate for 16-bit activations and attention that keeps no scores, twice that in float32: it holds for the
    usual transformer block, not for this or that kernel.

    Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models" (arXiv:2205.05198),
        equation 1, without the terms of the attention scores, with the width of the feed-forward block as it is.
    """
    shape = ModelShape.of(cfg.model)
    if shape is None:
        return None
    parameters = num_parameters(shape)
    return MemoryEstimate(
        num_parameters=parameters,
        weights=_FLOAT32 * parameters,
        gradients=_FLOAT32 * parameters,
        optimizer=_optimizer_bytes(cfg.optimizer) * parameters,
        activations=_activation_bytes(shape, cfg),
    )


def format_training_memory_estimate(estimate: MemoryEstimate) -> str:
    """A table of the estimate, one line a part, in MiB."""
    rows = {
        "weights": estimate.weights,
        "gradients": estimate.gradients,
        "optimizer": estimate.optimizer,
        "activations": estimate.activations,
        "total": estimate.total,
    }
    lines = [f"{'parameters':<12}{estimate.num_parameters:>16,d}"]
    return "\n".join([*lines, *(f"{name:<12}{size / _MIB:>12,.1f} MiB" for name, size in rows.items())])


def theoretical_memory_line(estimate: MemoryEstimate) -> str:
    """Megatron Bridge's line about weights, gradients and optimizer, in MiB."""
    return f"Theoretical memory footprints: weight and optimizer={estimate.weights_and_optimizer / _MIB:.2f} MB"


def report_theoretical_memory(cfg: Any) -> None:
    """Print `theoretical_memory_line` of a configuration; nothing for a model that no formula is known for."""
    estimate = estimate_training_memory(cfg)
    if estimate is not None:
        print(theoretical_memory_line(estimate), flush=True)  # noqa: T201 - this line is what was asked for


def num_parameters(shape: ModelShape) -> int:
    """Weights of a model of this shape: of the built-in transformer all of them, exactly."""
    hidden, heads_width = shape.hidden_size, shape.query_width
    keys_and_values = 2 * shape.kv_channels * shape.num_query_groups
    attention = hidden * (heads_width + keys_and_values) + heads_width * hidden
    attention += hidden * heads_width if shape.has_output_gate else 0
    attention += heads_width + keys_and_values if shape.qkv_bias else 0
    dense = shape.num_projections * hidden * shape.ffn_hidden_size
    experts = shape.num_projections * hidden * shape.moe_ffn_hidden_size * shape.num_experts
    experts += shape.num_projections * hidden * shape.shared_expert_size + hidden * shape.num_experts
    moe = shape.num_moe_layers
    norms = 2 * hidden * shape.all_layers + hidden
    vocabulary = hidden * shape.vocab_size * (1 if shape.ties_embeddings else 2)
    joining = shape.mtp_depth * (2 * hidden**2 + 3 * hidden)
    blocks = shape.all_layers * attention + (shape.all_layers - moe) * dense + moe * experts
    return blocks + norms + vocabulary + joining


def _optimizer_bytes(optimizer: Any) -> int:
    """Bytes of state for each parameter."""
    if optimizer.optimizer == "sgd":
        return _FLOAT32 if optimizer.sgd_momentum else 0
    return 2 * _FLOAT32


def _activation_bytes(shape: ModelShape, cfg: Any) -> int:
    batch: int = cfg.train.micro_batch_size or 1
    width = shape.ffn_hidden_size
    if shape.num_moe_layers:
        width = max(width, shape.moe_ffn_hidden_size * shape.moe_topk + shape.shared_expert_size)
    places = shape.seq_length * batch
    layer = places * (18 * shape.hidden_size + 4 * width)
    ends = places * (6 * shape.hidden_size + _FLOAT32 * shape.vocab_size)  # embedding, last norm, output, its loss
    bytes_of_type = 1 if cfg.mixed_precision is not None else 2
    return bytes_of_type * (shape.all_layers * layer + ends)
