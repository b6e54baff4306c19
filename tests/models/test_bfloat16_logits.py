"""In bfloat16, too, the built-in transformer computes the numbers of `transformers`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from onstep.models.hf.directory import load_hf


@pytest.mark.parametrize("is_mixed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_the_same_to_the_bit(dtype: torch.dtype, is_mixed: bool, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=99)).save_pretrained(tmp_path)
    theirs, tokens = LlamaForCausalLM.from_pretrained(tmp_path, dtype=dtype), torch.randint(0, 99, (2, 48))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=is_mixed):
        assert torch.equal(load_hf(tmp_path).to(dtype)(tokens), theirs(input_ids=tokens).logits)
