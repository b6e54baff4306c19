"""How many weights a model has, from its sizes alone: all of them, those that a token meets, those that LoRA adds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onstep.config.finetune_rules import LORA_PROJECTIONS
from onstep.metrics.model_shape import ModelShape

PROJECTIONS = LORA_PROJECTIONS
"""The matrices of a layer that LoRA goes to, by their names here and in `transformers`."""


@dataclass(frozen=True)
class Projection:
    """A matrix of a layer."""

    name: str
    inputs: int
    outputs: int


def num_parameters(shape: ModelShape) -> int:
    """Weights of a model of this shape: of the built-in transformer all of them, exactly."""
    layers = shape.all_layers * (_attention(shape) + 2 * _norm(shape))
    layers += shape.num_dense_layers * _feed_forward(shape, shape.ffn_hidden_size)
    layers += shape.num_moe_layers * _experts(shape, shape.num_experts)
    # embedding, positions, last norm and output; what joins embedding and hidden state in multi-token prediction
    hidden = shape.hidden_size
    vocabulary = hidden * shape.vocab_size * (1 if shape.ties_embeddings else 2)
    joining = shape.mtp_depth * (2 * hidden**2 + 3 * _norm(shape))
    return layers + (vocabulary + hidden * shape.num_positions + _norm(shape) + joining)


def num_active_parameters(shape: ModelShape) -> int:
    """Weights that a token meets: all but those of the experts that it does not go to."""
    unused = shape.num_experts - shape.moe_topk if shape.num_moe_layers else 0
    return num_parameters(shape) - shape.num_moe_layers * unused * _feed_forward(shape, shape.moe_ffn_hidden_size)


def num_layer_matrix_parameters(shape: ModelShape) -> int:
    """Weights in matrices between embedding and output, without the experts' stacked ones: what Muon is for."""
    attention = shape.hidden_size * (2 * shape.query_width + 2 * shape.key_width)
    attention += shape.hidden_size * shape.query_width if shape.has_output_gate else 0
    matrix = shape.num_projections * shape.hidden_size
    moe = matrix * shape.shared_expert_size + shape.hidden_size * shape.num_experts
    dense = shape.num_dense_layers * matrix * shape.ffn_hidden_size
    joining = shape.mtp_depth * 2 * shape.hidden_size**2
    return shape.all_layers * attention + dense + shape.num_moe_layers * moe + joining


def num_expert_matrix_parameters(shape: ModelShape) -> int:
    """Weights in the matrices of all experts that a router chooses from."""
    expert = shape.num_projections * shape.hidden_size * shape.moe_ffn_hidden_size
    return shape.num_moe_layers * shape.num_experts * expert


def num_lora_parameters(shape: ModelShape, dim: int, target_modules: Sequence[str] | None = None) -> int:
    """Weights that LoRA of rank `dim` adds: `dim * (inputs + outputs)` for each matrix that it goes to."""
    return dim * sum(one.inputs + one.outputs for one in lora_targets(shape, target_modules))


def lora_targets(shape: ModelShape, target_modules: Sequence[str] | None = None) -> list[Projection]:
    """The matrices of all layers that LoRA goes to; of a layer with experts those of its attention."""
    found = []
    for index in range(shape.num_layers):
        is_moe = bool(shape.moe_layers) and shape.moe_layers[index]
        for projection in _projections(shape, with_feed_forward=not is_moe):
            theirs = f"model.layers.{index}.{PROJECTIONS[projection.name]}"
            names = (f"layers.{index}.{projection.name}", theirs)
            if target_modules is None or any(is_target(name, target_modules) for name in names):
                found.append(projection)
    return found


def is_target(name: str, target_modules: Sequence[str]) -> bool:
    """Whether a module's name is one of `target_modules`, or ends with one after a dot."""
    return any(name == target or name.endswith(f".{target}") for target in target_modules)


def _projections(shape: ModelShape, with_feed_forward: bool) -> list[Projection]:
    hidden, query, key, width = shape.hidden_size, shape.query_width, shape.key_width, shape.ffn_hidden_size
    attention = [
        Projection("attention.query", hidden, query),
        Projection("attention.key", hidden, key),
        Projection("attention.value", hidden, key),
        Projection("attention.output", query, hidden),
    ]
    if not with_feed_forward:
        return attention
    gate = [Projection("feed_forward.gate", hidden, width)] if shape.num_projections == 3 else []
    block = [Projection("feed_forward.up", hidden, width), Projection("feed_forward.down", width, hidden)]
    return [*attention, *gate, *block]


def _norm(shape: ModelShape, width: int | None = None) -> int:
    return (2 if shape.norm_bias else 1) * (shape.hidden_size if width is None else width)


def _attention(shape: ModelShape) -> int:
    hidden, query, key = shape.hidden_size, shape.query_width, shape.key_width
    weights = hidden * (2 * query + 2 * key)
    weights += hidden * query if shape.has_output_gate else 0
    weights += query + 2 * key if shape.qkv_bias else 0
    weights += hidden if shape.linear_bias else 0
    weights += 2 * _norm(shape, shape.kv_channels) if shape.qk_norm else 0
    return weights


def _feed_forward(shape: ModelShape, width: int) -> int:
    """A block of `num_projections` matrices, the last of which leads back to the hidden size."""
    biases = (shape.num_projections - 1) * width + shape.hidden_size if shape.linear_bias else 0
    return shape.num_projections * shape.hidden_size * width + biases


def _experts(shape: ModelShape, num_experts: int) -> int:
    """The experts of a layer, their router, the shared expert and its gate."""
    shared = _feed_forward(shape, shape.shared_expert_size) if shape.shared_expert_size else 0
    gate = shape.hidden_size if shape.shared_expert_size and shape.shared_expert_gate else 0
    router = shape.hidden_size * shape.num_experts
    return num_experts * _feed_forward(shape, shape.moe_ffn_hidden_size) + shared + gate + router
