"""The layouts and variants of the table of layouts, by name."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

IN_BF16 = "mixed_precision=bf16_mixed"


@dataclass(frozen=True)
class Layout:
    """How the ranks of a row hold the model."""

    ranks: int
    keys: tuple[str, ...] = ()
    """Overrides of the configuration."""

    @property
    def tensor_ranks(self) -> int:
        """The ranks that divide the tensors of each layer, and have the same samples."""
        return int(dict(key.split("=") for key in self.keys).get("parallel.tensor_model_parallel_size", 1))

    @property
    def data_ranks(self) -> int:
        """The ranks with samples of their own."""
        return self.ranks // self.tensor_ranks // self.stage_ranks

    @property
    def stage_ranks(self) -> int:
        """The ranks of a pipeline, which have the same samples."""
        return int(dict(key.split("=") for key in self.keys).get("parallel.pipeline_model_parallel_size", 1))

    @property
    def divides_sequences(self) -> bool:
        """Whether it is sequence-parallel."""
        return SEQUENCES in self.keys


ROWS, LENGTH, VOCABULARY = 12, 12, 67
"""Rows of a step, their tokens, and a vocabulary that no number of ranks divides."""
SEQUENCES = "parallel.sequence_parallel=true"


def _sharded(ranks: int, *keys: str, replicas: int = 1) -> Layout:
    size = (
        f"parallel.data_parallel_replicate_size={replicas}",
        f"parallel.data_parallel_shard_size={ranks // replicas}",
    )
    return Layout(ranks, (*size, *keys))


DIVIDED = ("ddp.use_distributed_optimizer=true", "ddp.bucket_cap_mb=0.05")


def _divided(ranks: int, *keys: str) -> Layout:
    return Layout(ranks, (*DIVIDED, *keys))


def _tensors(size: int, *keys: str, shards: int = 1, replicas: int = 1) -> Layout:
    data = (f"parallel.data_parallel_replicate_size={replicas}", f"parallel.data_parallel_shard_size={shards}")
    return Layout(size * shards * replicas, (f"parallel.tensor_model_parallel_size={size}", *data, *keys))


def stages(ranks: int, schedule: str, *keys: str, replicas: int = 1, tensors: int = 1) -> Layout:
    """So many ranks of a pipeline, for each of the ranks of other axes that `keys` name."""
    own = (f"parallel.pipeline_model_parallel_size={ranks}", f"parallel.pipeline_schedule={schedule}")
    return Layout(ranks * replicas * tensors, (*own, *keys))


TWICE = "parallel.virtual_pipeline_model_parallel_size=2"
MASTERS = "optimizer.params_dtype=bfloat16"
"""Weights in bfloat16 with float32 masters, of models whose optimizer Onstep makes."""
IN_MXFP8 = "ddp.fp8_param_gather=true"
SHARED = "ddp.reuse_grad_buf_for_mxfp8_param_ag=true"
SUMS, GATHERS = "ddp.overlap_grad_reduce=true", "ddp.overlap_param_gather=true"
LAYOUTS = {
    "one": Layout(1),
    "ddp2": Layout(2),
    "ddp2 each": Layout(2, ("ddp.sync_each_micro_batch=true",)),
    "ddp4": Layout(4),
    "fsdp1": Layout(1, ("parallel.data_parallel_shard_size=-1",)),
    "fsdp2": _sharded(2),
    "fsdp4": _sharded(4),
    "fsdp2 keep": _sharded(2, "fsdp.reshard_after_forward=false"),
    "fsdp4 in twos": _sharded(4, "fsdp.reshard_after_forward=2"),
    "fsdp2 last": _sharded(2, "ddp.sync_each_micro_batch=false"),
    "fsdp2 prefetch": _sharded(2, "fsdp.prefetch=2"),
    "hsdp 2x2": _sharded(4, replicas=2),
    "distopt2": _divided(2),
    "distopt4": _divided(4),
    "distopt 2x2": _divided(4, "ddp.num_distributed_optimizer_instances=2"),
    "distopt2 sums": _divided(2, SUMS),
    "distopt4 sums": _divided(4, SUMS),
    "distopt 2x2 sums": _divided(4, SUMS, "ddp.num_distributed_optimizer_instances=2"),
    "distopt2 both": _divided(2, SUMS, GATHERS),
    "distopt4 both": _divided(4, SUMS, GATHERS),
    "distopt 2x2 both": _divided(4, SUMS, GATHERS, "ddp.num_distributed_optimizer_instances=2"),
    "one MXFP8": _divided(1, IN_MXFP8),
    "distopt2 MXFP8": _divided(2, IN_MXFP8),
    "distopt2 MXFP8 both": _divided(2, SUMS, GATHERS, IN_MXFP8, SHARED),
    "distopt2 masters": _divided(2, SUMS, GATHERS, MASTERS, "ddp.grad_reduce_in_fp32=true"),
    "fsdp2 offload": _sharded(2, "fsdp.cpu_offload=true"),
    "fsdp2 checkpointed": _sharded(2, "model.recompute_granularity=full"),
    "fsdp2 compiled": _sharded(2, "train.torch_compile=true"),
    "tp2": _tensors(2),
    "tp2 sp": _tensors(2, SEQUENCES),
    "tp4 sp": _tensors(4, SEQUENCES),
    "tp2 sp checkpointed": _tensors(2, SEQUENCES, "model.recompute_granularity=full"),
    "dp2 x tp2": _tensors(2, replicas=2),
    "fsdp2 x tp2": _tensors(2, shards=2),
    "fsdp2 x tp2 sp": _tensors(2, SEQUENCES, shards=2),
    "hsdp 2x2 x tp2 sp": _tensors(2, SEQUENCES, shards=2, replicas=2),
    "distopt2 x tp2": _tensors(2, *DIVIDED, replicas=2),
    "distopt2 x tp2 sp": _tensors(2, *DIVIDED, SEQUENCES, replicas=2),
    "distopt2 x tp2 sp both": _tensors(2, *DIVIDED, SEQUENCES, SUMS, GATHERS, replicas=2),
    "tp2 sp bf16": _tensors(2, SEQUENCES, IN_BF16),
    "fsdp2 x tp2 sp bf16": _tensors(2, SEQUENCES, IN_BF16, shards=2),
    "pp2": stages(2, "1F1B"),
    "pp2 GPipe": stages(2, "GPipe"),
    "pp2 interleaved": stages(2, "Interleaved1F1B", TWICE),
    "pp2 LoopedBFS": stages(2, "LoopedBFS", TWICE),
    "pp2 zero bubble": stages(2, "InterleavedZeroBubble", TWICE),
    "pp2 ZBV": stages(2, "ZBVZeroBubble"),
    "pp2 DualPipeV": stages(2, "DualPipeV"),
    "pp4": stages(4, "1F1B"),
    "dp2 x pp2": stages(2, "1F1B", replicas=2),
    "tp2 x pp2": stages(2, "1F1B", "parallel.tensor_model_parallel_size=2", tensors=2),
    "fsdp2 x pp2": stages(2, "Interleaved1F1B", TWICE, "parallel.data_parallel_shard_size=2", replicas=2),
    "distopt2 x pp2": stages(2, "1F1B", *DIVIDED, replicas=2),
    "one bf16": Layout(1, (IN_BF16,)),
    "ddp2 bf16": Layout(2, (IN_BF16,)),
    "fsdp2 bf16": _sharded(2, IN_BF16),
}


@dataclass(frozen=True)
class Variant:
    """What is trained: a model and the data of its steps."""

    model: str = "own"
    """own | llama | gpt2"""
    keys: tuple[str, ...] = ()
    """Overrides of the configuration."""
    accumulation: int = 1
    """Micro-batches of a step on each rank."""
    has_empty_rank: bool = False
    """Whether the last rank of four, or what is its share with fewer, has no labels."""
    groups: bool = False
    """Two groups of the optimizer, and a frozen embedding."""
    lora: bool = False
    same_micro_batches: bool = False
    """Whether one process takes the micro-batches that the ranks take, as a loss of each micro-batch requires."""
    dtype: str = "float32"
    loss: str = "step"
    """step (of logits, in the forward step) | model (in the model, from labels)"""
    door: str = "train"
    """train | pretrain (our transformer on a text of its own) | Trainer"""
    options: dict[str, Any] = field(default_factory=dict)
    """Of the configuration of a model of transformers."""
    recipe: str | None = None
    """The recipe whose configuration it is a small form of."""
    packed: bool = False
    """Whether sequences hold several documents, which do not see each other."""
    on_page: bool = False
    """Whether it is a variant of the page of layouts: 16 rows a step, four layers, evaluations, generated tokens."""

    @property
    def rows(self) -> int:
        """Of a step."""
        return 16 if self.on_page else ROWS

    @property
    def losses_of_micro_batch(self) -> int:
        """The number of parts of a micro-batch whose losses the model computes one after the other."""
        return 2 if "model.chunked_loss=true" in self.keys else 1

    @property
    def has_dropout(self) -> bool:
        """Whether it draws masks."""
        return any("dropout=" in key for key in self.keys)


_GPT2 = ("model.normalization=LayerNorm", "model.add_bias_linear=true", "model.gated_linear_unit=false")
_BIASES = ("model.add_qkv_bias=true", "model.activation_func=gelu")
VARIANTS = {
    "plain": Variant(),
    "accumulated": Variant(accumulation=3),
    "unclipped": Variant(keys=("optimizer.clip_grad=0",)),
    "an empty rank": Variant(has_empty_rank=True, accumulation=3),
    "tied": Variant(keys=("model.share_embeddings_and_output_weights=true",)),
    "groups": Variant(groups=True),
    "lora": Variant(lora=True),
    "learned positions": Variant(keys=("model.position_embedding_type=learned_absolute", *_GPT2, *_BIASES)),
    "grouped": Variant(keys=("model.num_query_groups=2", "model.qk_layernorm=true"), has_empty_rank=True),
    "one group": Variant(
        keys=("model.num_query_groups=1", "model.add_qkv_bias=true", "model.qk_layernorm=true"), has_empty_rank=True
    ),
    "losses": Variant(loss="model", accumulation=3, has_empty_rank=True),
    "losses of words": Variant(loss="model", keys=("model.chunked_loss=true",)),
    "attention dropout": Variant(keys=("model.attention_dropout=0.1",)),
    "dropout": Variant(keys=("model.hidden_dropout=0.1",)),
    "moe": Variant(keys=("model.num_moe_experts=4", "model.moe_aux_loss_coeff=0.01"), same_micro_batches=True),
    "experts": Variant(
        keys=(
            *("model.num_moe_experts=4", "model.moe_router_topk=3", "model.moe_ffn_hidden_size=24"),
            *("model.moe_layer_freq=2", "model.moe_shared_expert_intermediate_size=16"),
            *("model.moe_shared_expert_gate=true", "model.add_bias_linear=true", "model.moe_aux_loss_coeff=0.01"),
            *("model.moe_router_enable_expert_bias=true", "model.moe_router_score_function=sigmoid"),
        ),
        same_micro_batches=True,
        accumulation=3,
    ),
    "experts of float64": Variant(
        keys=(*("model.num_moe_experts=4", "model.moe_router_topk=2"), "model.moe_aux_loss_coeff=0.01"),
        same_micro_batches=True,
        dtype="float64",
    ),
    "later tokens": Variant(keys=("model.mtp_num_layers=2",), loss="model", accumulation=3, has_empty_rank=True),
    "float64": Variant(dtype="float64"),
    "llama": Variant("llama", accumulation=3),
    "llama tied": Variant("llama", options={"tie_word_embeddings": True}),
    "gpt2": Variant("gpt2", accumulation=3),
    "mixtral": Variant("mixtral", options={"num_local_experts": 4, "output_router_logits": True}),
    "one head": Variant("llama", options={"num_key_value_heads": 1}),
    "qwen2": Variant("qwen2"),
    "llama padded": Variant("llama", options={"pad_token_id": 3, "tie_word_embeddings": True}),
    "qwen3": Variant("qwen3", accumulation=3, options={"head_dim": 8}),  # by default 128, whatever the width
    "pretrain": Variant(door="pretrain", accumulation=3),
    "muon": Variant(door="pretrain", keys=("optimizer.optimizer=muon", "optimizer.muon_fp32_matmul_prec=highest")),
    "muon in bf16": Variant(door="pretrain", keys=("optimizer.optimizer=muon",)),
    "Trainer": Variant("llama", door="Trainer", accumulation=3),
}
_DROPOUT = ("model.hidden_dropout=0.1", "model.attention_dropout=0.1")
PAGE = {
    "ragged": Variant(keys=("optimizer.clip_grad=0.5",), has_empty_rank=True, groups=True, accumulation=4),
    "both dropouts": Variant(keys=_DROPOUT, accumulation=4),
    "once": Variant(door="pretrain", recipe="gpt2_124m", accumulation=1),
    "recipe": Variant(door="pretrain", recipe="llama32_1b", packed=True, accumulation=4),
    "family": Variant("llama", door="pretrain", options={"tie_word_embeddings": True}, packed=True, accumulation=4),
    "given model": Variant("llama", has_empty_rank=True, accumulation=4),
    "a Trainer": Variant("llama", door="Trainer", has_empty_rank=True, accumulation=4),
}
"""The variants of the page of layouts, which have several features each."""
VARIANTS |= {name: replace(variant, on_page=True) for name, variant in PAGE.items()}
