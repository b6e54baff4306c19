"""Small trained weights of `transformers`, for runs that start from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

VOCABULARY, LENGTH = 260, 32


def llama(directory: Path, seed: int = 0, **settings: Any) -> LlamaForCausalLM:
    """A Llama of two layers in `directory`; other sizes than those of any configuration's defaults."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
        "rope_theta": 5000.0,
    }
    model = LlamaForCausalLM(LlamaConfig(**{**sizes, **settings})).eval()
    model.save_pretrained(directory)
    return model


def gpt2(directory: Path) -> GPT2LMHeadModel:
    """A GPT-2 of two layers in `directory`."""
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": LENGTH, "vocab_size": VOCABULARY}
    model = GPT2LMHeadModel(GPT2Config(**sizes)).eval()
    model.save_pretrained(directory)
    return model


def tokens(rows: int = 2, length: int = 16) -> torch.Tensor:
    """(rows, length) of any tokens, the same each time."""
    return torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(7))
