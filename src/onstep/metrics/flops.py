"""Computes the floating-point operations of a training step and the model FLOPs utilization."""

from __future__ import annotations

from typing import Any

from onstep.metrics.model_shape import ModelShape, num_lora_parameters

_FORWARD_AND_BACKWARD = 3
"""A matrix product in the forward pass entails two in the backward pass: for its input and its weights."""
_OF_FROZEN = 2
"""A frozen matrix has only two of the three products: the one for its own gradient is not computed."""
_MULTIPLY_ADD = 2

MFU_DEFINITION = (
    "MFU = model FLOPs per second and device / peak FLOP/s of the device. Model FLOPs are the matrix products of one "
    "forward and one backward pass (3 x 2 x weights used by a token, causal attention at half); recomputation, the "
    "embedding, norms, activations and the optimizer are not counted."
)
"""The definition of `model_flops_utilization`."""


def num_floating_point_operations(
    cfg: Any,
    batch_size: int,
    total_seq_len: float | None = None,
    sum_sq_seq_len: float | None = None,
    *,
    seq_length: int | None = None,
) -> float:
    """Model FLOPs of one training step: a forward and a backward pass over `batch_size` sequences.

    Counts matrix products: the projections of attention, its scores (causal, hence at half), feed-forward blocks (for a
    mixture of experts, the active and shared ones), multi-token prediction and the output layer. Excludes the
    embedding, norms, rotary embeddings, activation functions, softmax, router, loss and optimizer. With
    `peft.peft_scheme`, frozen matrices count two products and LoRA's three; ignores that the first layer needs no
    gradient of its input.

    Args:
        cfg: a `ConfigContainer`, or a model configuration (without information about LoRA).
        batch_size: number of sequences in a step over all ranks.
        total_seq_len: tokens in all sequences, if not `batch_size * seq_length` (packed data).
        sum_sq_seq_len: sum of the squared lengths of all sequences; None assumes equal lengths.
        seq_length: tokens per sequence; None means the configured length.

    Returns:
        0 for models without a known formula: without attention heads, hybrid, or with latent attention.

    Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM"
        (arXiv:2104.04473), appendix, without its factor for recomputation; Chowdhery et al. 2022, "PaLM"
        (arXiv:2204.02311), appendix B.
    """
    shape = ModelShape.of(getattr(cfg, "model", cfg), seq_length)
    if shape is None:
        return 0.0
    tokens = float(batch_size * shape.seq_length if total_seq_len is None else total_seq_len)
    if not tokens:
        return 0.0
    squares = tokens * shape.seq_length if sum_sq_seq_len is None else sum_sq_seq_len
    scores = shape.all_layers * shape.query_width * (squares / tokens)
    matrices = shape.all_layers * shape.attention_matrices
    matrices += shape.num_dense_layers * shape.block_matrices(shape.ffn_hidden_size)
    met_experts = shape.moe_ffn_hidden_size * shape.moe_topk + shape.shared_expert_size
    matrices += shape.num_moe_layers * shape.block_matrices(met_experts)
    matrices += shape.joining_matrices + 3 * shape.mtp_depth * shape.hidden_size
    matrices += shape.hidden_size * shape.vocab_size * (shape.mtp_depth + 1)
    peft = getattr(cfg, "peft", None)
    if peft is None or peft.peft_scheme is None:
        passes = _FORWARD_AND_BACKWARD * (matrices + scores)
    else:
        added = num_lora_parameters(shape, peft.dim, peft.target_modules)
        passes = _OF_FROZEN * matrices + _FORWARD_AND_BACKWARD * (added + scores)
    return _MULTIPLY_ADD * tokens * passes


def model_flops_utilization(flops_per_second: float, peak_flops: float | None) -> float | None:
    """Model FLOP/s as a fraction of the device's peak, as `MFU_DEFINITION` says; None if unknown.

    Args:
        flops_per_second: model FLOP/s of one device.
        peak_flops: peak FLOP/s of the device at the precision of the run; None if unknown.
    """
    return None if not peak_flops else flops_per_second / peak_flops
