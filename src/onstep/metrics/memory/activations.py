"""Estimates what a micro-batch needs besides the weights: activations, logits, copies and temporary tensors."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from onstep.config.checks.model import LORA_PROJECTIONS
from onstep.metrics.memory.counts import WeightCounts
from onstep.metrics.memory.storage import FLOAT32, HALF, Storage
from onstep.metrics.model_shape import ModelShape, is_target

_CHUNK, _FROZEN_CHUNK, _LARGE_VOCABULARY = 2**28, 2**26, 65_536
"""Elements of a chunk of logits, if the head is trained and if it is frozen, and the least vocabulary that is divided
by default: see `models/vocabulary_loss`."""
_INPUTS_OF_ATTENTION = ("attention.query", "attention.key", "attention.value")
_INPUTS_OF_BLOCK = ("feed_forward.gate", "feed_forward.up")


@dataclass(frozen=True)
class MicroBatch:
    """Bytes that a micro-batch needs, each at its most."""

    activations: int
    """What is kept for the backward pass when it begins."""
    layer: int
    """What one layer keeps, or computes again in the backward pass."""
    logits: int
    """Logits, and what the loss makes of them."""
    copies: int
    """16-bit copies of weights while the loss is computed."""
    copies_of_layer: int
    """16-bit copies of weights while one layer is computed."""
    temporary: int
    """Gradients of activations in the backward pass of one layer."""
    on_host: int = 0
    """What `model.offload_activations` keeps in the memory of the host in place of the device."""
    kept_logits: int = 0
    """What the loss keeps for its backward pass."""

    def in_pipeline(self, held: float, losses: int, outputs: int) -> MicroBatch:
        """The needs of a rank that has the activations of several micro-batches at once.

        Args:
            held: their number.
            losses: that of the losses that wait for their backward passes; 0 where the model ends in none.
            outputs: bytes of the hidden states that stages between those of this rank hand on.
        """
        return replace(
            self,
            activations=int((self.activations + outputs) * held),
            on_host=int(self.on_host * held),
            logits=self.logits + max(0, losses - 1) * self.kept_logits,
        )


def micro_batch(shape: ModelShape, cfg: Any, counts: WeightCounts, storage: Storage) -> MicroBatch:
    """The needs of one micro-batch (of one sample, if its size is not set) of the built-in transformer.

    It is exact for dense layers without dropout on a CPU. Experts are estimated.

    Source: the method of Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models"
        (arXiv:2205.05198), section 4.1: adding up the tensors that each operation keeps.
    """
    tokens: int = shape.seq_length * (cfg.train.micro_batch_size or 1)
    layers = [_Layer(shape, storage, _targets(cfg.peft, index)) for index in range(shape.all_layers)]
    first = layers[0] if layers else _Layer(shape, storage, None)  # a stage may have the embedding or the head alone
    sizes = [layer.kept(bool(shape.moe_layers) and shape.moe_layers[index]) for index, layer in enumerate(layers)]
    if counts.added and layers:  # nothing before the first adapter has a gradient
        sizes[0] -= first.norm(shape.hidden_size) // shape.sequence_parts
    granularity, interval = (
        getattr(cfg.model, "recompute_granularity", None),
        getattr(cfg.model, "recompute_interval", 1),
    )
    recomputes = granularity == "full" and interval == 1
    of_recomputed = storage.residual * shape.hidden_size // shape.sequence_parts + (
        first.products() if granularity == "selective" else 0
    )
    kept = sum(
        size if granularity is None or index % interval else min(size, of_recomputed)
        for index, size in enumerate(sizes)
    )
    if storage.quantization == "int8":  # bitsandbytes keeps the inputs of its layers, also those computed again
        again = shape.query_width if recomputes else 0
        inputs = 2 * shape.hidden_size + shape.ffn_hidden_size + again
        kept += storage.product * (len(sizes) * inputs - shape.hidden_size)
    ends, logits, kept_logits = _ends(shape, cfg, counts, storage, tokens)
    copies, angles = _copies(counts, storage, recomputes), _angles(shape, cfg, storage)
    on_host = tokens * kept if cfg.model.offload_activations else 0
    return MicroBatch(
        activations=tokens * (kept + _handed_on(shape, storage, first))
        + ends
        + (angles if storage.quantization else 0)
        - on_host,
        layer=tokens * max(sizes, default=0),
        logits=logits * (1 + shape.mtp_depth),
        copies=copies + (0 if storage.quantization else angles),
        copies_of_layer=copies // max(1, len(sizes)),
        temporary=tokens * (first.temporary() if layers else 0) + _dequantized(counts, storage),
        on_host=on_host,
        kept_logits=kept_logits,
    )


def _handed_on(shape: ModelShape, storage: Storage, layer: _Layer) -> int:
    """Bytes per token of what the last layer hands on: to the last norm, or to the next stage of a pipeline."""
    if shape.has_head:
        return layer.norm(shape.hidden_size) // shape.sequence_parts
    return storage.residual * shape.hidden_size // shape.sequence_parts


def _angles(shape: ModelShape, cfg: Any, storage: Storage) -> int:
    """Bytes of the cosines and sines of positions in the type of embeddings, where that has 16 bits."""
    is_rotary = getattr(cfg.model, "position_embedding_type", "rope") == "rope"
    return shape.seq_length * shape.kv_channels * HALF if is_rotary and storage.residual == HALF else 0


def _dequantized(counts: WeightCounts, storage: Storage) -> int:
    """Bytes of the largest quantized matrix as it is multiplied."""
    sizes = [rows * columns for rows, columns in counts.matrices] if storage.quantization is not None else []
    return storage.product * max(sizes, default=0)


def _ends(shape: ModelShape, cfg: Any, counts: WeightCounts, storage: Storage, tokens: int) -> tuple[int, int, int]:
    """Bytes that are kept of the output's input, the most that the loss needs, and what it keeps."""
    is_trained, (vocabulary, hidden) = not counts.added, counts.head
    if not shape.has_head:
        return 0, 0, 0
    chunk = _chunk(cfg.model, vocabulary, tokens, _CHUNK if is_trained else _FROZEN_CHUNK)
    if chunk is None:  # logits, their log-softmax and its gradient
        kept = storage.product * hidden // shape.sequence_parts if is_trained else 0
        return tokens * kept + 2 * FLOAT32, 3 * FLOAT32 * vocabulary * tokens, FLOAT32 * vocabulary * tokens
    gradients = storage.product * hidden * tokens + (FLOAT32 * vocabulary * hidden if is_trained else 0)
    return 0, gradients + (FLOAT32 + storage.product) * vocabulary * chunk, gradients


def _copies(counts: WeightCounts, storage: Storage, recomputes: bool) -> int:
    """Bytes of the casts of weights that exist while the loss is computed.

    Autocast caches those of trained weights; those of frozen weights exist if the backward pass needs them.
    """
    head = storage.product * counts.in_head
    if not counts.added:
        return storage.product * counts.cast + head if storage.casts(storage.trained) else 0
    copies = storage.product * counts.added if storage.casts(storage.trained) else 0
    if storage.casts(storage.frozen):
        copies += head + (0 if recomputes or storage.quantization else storage.product * (counts.cast - counts.added))
    return copies


def _chunk(model: Any, vocabulary: int, tokens: int, elements: int) -> int | None:
    """The number of tokens whose logits exist at once; None for all."""
    option, size = getattr(model, "chunked_loss", None), max(1, elements // vocabulary)
    is_wanted = vocabulary >= _LARGE_VOCABULARY if option is None else option
    return size if is_wanted and tokens > size else None


@lru_cache(maxsize=1024)
def _is_adapted(index: int, name: str, targets: tuple[str, ...] | None) -> bool:
    names = (f"layers.{index}.{name}", f"model.layers.{index}.{LORA_PROJECTIONS[name]}")
    return targets is None or any(is_target(one, targets) for one in names)


def _targets(peft: Any, index: int) -> dict[str, int] | None:
    """The projections of a layer with LoRA, and its rank; None if the whole layer is trained."""
    if peft is None or peft.peft_scheme is None:
        return None
    targets = None if peft.target_modules is None else tuple(peft.target_modules)
    return {name: peft.dim for name in LORA_PROJECTIONS if _is_adapted(index, name, targets)}


@dataclass(frozen=True)
class _Layer:
    """What a layer keeps for the backward pass, in bytes per token."""

    shape: ModelShape
    storage: Storage
    adapted: dict[str, int] | None
    """The rank of LoRA for each projection that has it; None without LoRA."""

    def kept(self, has_experts: bool) -> int:
        """All of it."""
        shape, product = self.shape, self.storage.product
        size = 2 * self.norm(shape.hidden_size) // shape.sequence_parts + self._inputs(
            shape.hidden_size, _INPUTS_OF_ATTENTION
        )
        size += product * (2 * shape.query_width + 2 * shape.key_width) + FLOAT32 * shape.num_attention_heads
        if shape.qk_norm:
            heads = shape.num_attention_heads + shape.num_query_groups
            size += heads * self.norm(shape.kv_channels)
        size += self._input_again(shape.query_width, "attention.output")
        if has_experts:
            return size + self._experts()
        gated = shape.num_projections == 3
        size += self._inputs(shape.hidden_size, _INPUTS_OF_BLOCK if gated else _INPUTS_OF_BLOCK[1:])
        size += product * (3 if gated else 1) * shape.ffn_hidden_size
        keeps_inner = self.adapted is None or "feed_forward.down" in self.adapted
        size += product * shape.ffn_hidden_size if keeps_inner else 0
        return size + self._ranks("feed_forward.down")

    def products(self) -> int:
        """The results of matrix products and of attention, which selective recomputation keeps."""
        shape, product = self.shape, self.storage.product
        widths = 2 * shape.query_width + 2 * shape.key_width + 2 * shape.hidden_size
        widths += (shape.num_projections - 1) * shape.ffn_hidden_size
        return product * widths + FLOAT32 * shape.num_attention_heads + self._ranks(*(self.adapted or {}))

    def norm(self, width: int) -> int:
        """A norm's input, its normed input if the scale is trained and the norm not fused, and its statistics."""
        shape, storage = self.shape, self.storage
        if shape.norm_bias:
            return storage.residual * width + 2 * (FLOAT32 if storage.has_fused_norms else storage.residual)
        if storage.has_fused_norms:
            return storage.residual * width + FLOAT32
        return (2 if self.adapted is None else 1) * FLOAT32 * width + FLOAT32

    def temporary(self) -> int:
        """Gradients that exist at once in the backward pass of the feed-forward block, of which there are most."""
        shape = self.shape
        width = max(shape.ffn_hidden_size, shape.moe_ffn_hidden_size * shape.moe_topk if shape.num_experts else 0)
        return 2 * self.storage.residual * shape.hidden_size + shape.num_projections * self.storage.product * width

    def _inputs(self, width: int, names: Collection[str]) -> int:
        """What projections with a common input keep of it: autocast casts it for each of them."""
        product = self.storage.product
        if self.adapted is None:
            if (parts := self.shape.sequence_parts) > 1:  # of which one cast is kept
                return product * width // parts
            return product * width * (len(names) if self.storage.casts_inputs else 1)
        found = [name for name in names if name in self.adapted]
        size = product * width * (len(found) if self.storage.casts_inputs else min(1, len(found)))
        return size + self._ranks(*found)

    def _input_again(self, width: int, name: str) -> int:
        """What a projection keeps of an input that is kept already: LoRA casts it to float32 and back."""
        if self.adapted is None or name not in self.adapted:
            return 0
        return (self.storage.product * width if self.storage.casts_inputs else 0) + self._ranks(name)

    def _ranks(self, *names: str) -> int:
        """What LoRA keeps between its two matrices."""
        return sum(self.storage.product * (self.adapted or {}).get(name, 0) for name in names)

    def _experts(self) -> int:
        shape, product = self.shape, self.storage.product
        width = shape.moe_ffn_hidden_size * shape.moe_topk + shape.shared_expert_size
        factors = 4 if shape.num_projections == 3 else 2
        sent = 2 * shape.moe_topk * shape.hidden_size  # a token's input to each of its experts, and each one's output
        return product * (2 * shape.hidden_size + factors * width + sent) + 3 * FLOAT32 * shape.num_experts
