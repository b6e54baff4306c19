"""Counts the weights of a model by what determines the bytes that training holds for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from onstep.metrics.model_shape import (
    ModelShape,
    num_layer_matrix_parameters,
    num_lora_parameters,
    num_parameters,
)

Matrix = tuple[int, int]
"""Rows and columns of the weight of a linear layer: its outputs and inputs."""

_BLOCK, _BLOCK_OF_SCALES = 64, 256
_TABLES = 4 * (16 + 256 + 1)
"""The values of the codes of weights and of scales, and the mean of the scales, in float32, for each matrix."""


@dataclass(frozen=True)
class WeightCounts:
    """A model's weights in numbers."""

    base: int
    """Number of weights without those that LoRA adds."""
    added: int
    """Number of weights that LoRA adds, which are then the only trained ones; 0 without LoRA."""
    matrices: tuple[Matrix, ...]
    """Those of the linear layers between embedding and output, except routers and stacked experts."""
    muon: int
    """Number of weights that Muon optimizes, if all are trained."""
    cast: int
    """Number of weights that autocast casts, if all are float32: linear layers with biases, experts, and LoRA's."""
    head: Matrix
    """The output matrix, which may be the embedding; without rows where there is none."""
    ties_head: bool
    """Whether embedding and output are here, and are one matrix."""
    embedding: Matrix
    """The matrix that embeds tokens; without rows where there is none."""

    @property
    def trained(self) -> int:
        """Number of trained weights."""
        return self.added or self.base

    @property
    def frozen(self) -> int:
        """Number of weights that are not trained."""
        return self.base if self.added else 0

    @property
    def total(self) -> int:
        """Number of all weights."""
        return self.base + self.added

    @property
    def in_head(self) -> int:
        """Number of weights of the output matrix."""
        return self.head[0] * self.head[1]

    @property
    def in_embedding(self) -> int:
        """Number of weights of the embedding."""
        return self.embedding[0] * self.embedding[1]

    @property
    def in_ends(self) -> int:
        """Number of weights of both."""
        return self.in_embedding + (0 if self.ties_head else self.in_head)

    @property
    def in_matrices(self) -> int:
        """Number of weights in `matrices`."""
        return sum(rows * columns for rows, columns in self.matrices)

    @classmethod
    def of(cls, shape: ModelShape, peft: Any = None) -> WeightCounts:
        """The counts of the built-in transformer."""
        is_lora = peft is not None and peft.peft_scheme is not None
        added = num_lora_parameters(shape, peft.dim, peft.target_modules) if is_lora else 0
        matrices = tuple(_matrices(shape))
        experts = shape.num_moe_layers * shape.num_experts * shape.block_matrices(shape.moe_ffn_hidden_size)
        plain = sum(rows * columns for rows, columns in matrices)
        return cls(
            base=num_parameters(shape),
            added=added,
            matrices=matrices,
            muon=num_layer_matrix_parameters(shape),
            cast=plain + _biases(shape) + experts + shape.joining_matrices + added,
            head=(shape.vocab_size if shape.has_head else 0, shape.hidden_size),
            ties_head=shape.ties_embeddings and shape.has_embedding and shape.has_head,
            embedding=(shape.vocab_size if shape.has_embedding else 0, shape.hidden_size),
        )

    def quantized_bytes(self, kind: str) -> int:
        """Bytes of `matrices` as bitsandbytes holds them.

        nf4: half a byte per weight, a scale of 8 bits per block of 64 weights, and a float32 per 256 of these; int8: a
        byte per weight, and a float32 per row.

        Source: Dettmers et al. 2023, "QLoRA" (arXiv:2305.14314), section 3, double quantization.
        """
        if kind == "int8":
            return sum(rows * columns + 4 * rows for rows, columns in self.matrices)
        return sum(_nf4_bytes(rows * columns) for rows, columns in self.matrices)


def _biases(shape: ModelShape) -> int:
    """Number of biases of the linear layers."""
    attention = (shape.query_width + 2 * shape.key_width) * shape.qkv_bias + shape.hidden_size * shape.linear_bias
    block = ((shape.num_projections - 1) * shape.ffn_hidden_size + shape.hidden_size) * shape.linear_bias
    return shape.all_layers * attention + shape.num_dense_layers * block


def _nf4_bytes(weights: int) -> int:
    blocks = -(-weights // _BLOCK)
    return -(-weights // 2) + blocks + 4 * -(-blocks // _BLOCK_OF_SCALES) + _TABLES


def _matrices(shape: ModelShape) -> list[Matrix]:
    hidden, found = shape.hidden_size, []
    for index in range(shape.all_layers):
        has_experts = bool(shape.moe_layers) and shape.moe_layers[index]
        width = shape.shared_expert_size if has_experts else shape.ffn_hidden_size
        found += [(shape.query_width, hidden), (shape.key_width, hidden), (shape.key_width, hidden)]
        found += [(hidden, shape.query_width)]
        if shape.has_output_gate:
            found += [(shape.query_width, hidden)]
        if width:
            found += [(width, hidden)] * (shape.num_projections - 1) + [(hidden, width)]
    return found
