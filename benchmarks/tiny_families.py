"""Tiny models of `transformers` with random weights, and a tokenizer trained on the spot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

TEXT = "All work and no play makes Jack a dull boy, and Jill walks up the hill.\n"
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
VOCABULARY = 320
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
_NO_HEAD_DIM = {"head_dim": None}
_GEMMA = {"query_pre_attn_scalar": 8, "sliding_window": 16, "hidden_activation": "gelu_pytorch_tanh"}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": _GEMMA,
    "gemma3_text": {**_GEMMA, "layer_types": ["sliding_attention", "full_attention"]},
    "mistral": {"sliding_window": 16},
    "phi3": {**_NO_HEAD_DIM},
    "llama4_text": {
        "intermediate_size_mlp": 48,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "num_hidden_layers": 4,
        "attention_chunk_size": 16,
    },
    "falcon": {**_NO_HEAD_DIM, "new_decoder_architecture": False, "multi_query": True, "alibi": False},
    "olmo2": {**_NO_HEAD_DIM},
    "gpt_neox": {**_NO_HEAD_DIM},
    "stablelm": {**_NO_HEAD_DIM},
    "granite": {**_NO_HEAD_DIM, "logits_scaling": 2.0, "residual_multiplier": 0.5},
    "cohere": {**_NO_HEAD_DIM},
    "smollm3": {**_NO_HEAD_DIM, "no_rope_layers": [1, 0]},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True},
    "bert": {"is_decoder": False},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "mamba": {"state_size": 8, "time_step_rank": 4},
}
"""`model_type`, with what its configuration has besides `SIZES`."""


def tokenizer(directory: Path) -> None:
    """A BPE tokenizer with a chat template in `directory`, trained on `TEXT`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        [TEXT] * 4,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        ),
    )
    make: Any = PreTrainedTokenizerFast
    fast = make(tokenizer_object=bpe, eos_token=special[0], pad_token=special[0])
    fast.chat_template = TEMPLATE
    fast.save_pretrained(directory)


def family(directory: Path, name: str, *, seed: int = 0, std: float = 0.2, **settings: Any) -> Any:
    """A tiny model of that family in `directory`, with the tokenizer; its matrices have the deviation `std`."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto import CONFIG_MAPPING

    sizes = {key: value for key, value in {**SIZES, **FAMILIES[name], **settings}.items() if value is not None}
    torch.manual_seed(seed)
    auto: Any = AutoModelForCausalLM
    settings_of: Any = CONFIG_MAPPING[name]
    model = auto.from_config(settings_of(**sizes, initializer_range=std), dtype=torch.float32).eval()
    model.save_pretrained(directory)
    tokenizer(directory)
    return model


def write_data(directory: Path) -> None:
    """`text.txt` and conversations in `chat.jsonl`."""
    (directory / "text.txt").write_text(TEXT * 80)
    lines = [{"prompt": f"What is {n} + 1?", "response": f"It is {n + 1}, " * (1 + n % 4)} for n in range(60)]
    (directory / "chat.jsonl").write_text("\n".join(map(json.dumps, lines)))
