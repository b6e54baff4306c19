"""A llama of torchtitan is converted to one of transformers, which computes the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from onstep.cli.main import main

WIDTH, HEADS, GROUPS, INNER, LAYERS, VOCABULARY = 16, 4, 2, 24, 2, 31
SIZE = WIDTH // HEADS
EPS, THETA = 1e-5, 10000.0


def weights() -> dict[str, Tensor]:
    """As torchtitan names them."""
    torch.manual_seed(0)
    found = {"tok_embeddings.weight": torch.randn(VOCABULARY, WIDTH), "norm.weight": torch.rand(WIDTH)}
    found["output.weight"] = torch.randn(VOCABULARY, WIDTH)
    shapes = {"attention.wq": (WIDTH, WIDTH), "attention.wo": (WIDTH, WIDTH)}
    shapes |= dict.fromkeys(("attention.wk", "attention.wv"), (GROUPS * SIZE, WIDTH))
    shapes |= {"feed_forward.w1": (INNER, WIDTH), "feed_forward.w2": (WIDTH, INNER), "feed_forward.w3": (INNER, WIDTH)}
    for layer in range(LAYERS):
        found |= {f"layers.{layer}.{name}.weight": torch.randn(shape) / 4 for name, shape in shapes.items()}
        found |= {f"layers.{layer}.{name}.weight": torch.rand(WIDTH) for name in ("attention_norm", "ffn_norm")}
    return found


def rotated(x: Tensor) -> Tensor:
    """Neighboring pairs as complex numbers, (heads, seq, size)."""
    angles = torch.arange(x.shape[1])[:, None] / THETA ** (torch.arange(0, SIZE, 2) / SIZE)
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(turned).flatten(-2)


def logits(found: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """What the llama of torchtitan computes for a sequence."""
    x = found["tok_embeddings.weight"][tokens]
    for layer in range(LAYERS):
        own = {name.split(".", 2)[2]: one for name, one in found.items() if name.startswith(f"layers.{layer}.")}
        h = rms_norm(x, (WIDTH,), own["attention_norm.weight"], EPS)
        q, k, v = ((h @ own[f"attention.w{one}.weight"].T).unflatten(1, (-1, SIZE)).transpose(0, 1) for one in "qkv")
        k, v = (one.repeat_interleave(HEADS // GROUPS, 0) for one in (rotated(k), v))
        mixed = scaled_dot_product_attention(rotated(q), k, v, is_causal=True)
        x = x + mixed.transpose(0, 1).flatten(1) @ own["attention.wo.weight"].T
        h = rms_norm(x, (WIDTH,), own["ffn_norm.weight"], EPS)
        gated = silu(h @ own["feed_forward.w1.weight"].T) * (h @ own["feed_forward.w3.weight"].T)
        x = x + gated @ own["feed_forward.w2.weight"].T
    return rms_norm(x, (WIDTH,), found["norm.weight"], EPS) @ found["output.weight"].T


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_it_computes_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    found = weights()
    state = {**found, "optimizer": {"exp_avg": torch.ones(2)}}
    dcp.save(state, checkpoint_id=tmp_path / "titan", no_dist=True)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        rms_norm_eps=EPS,
        rope_theta=THETA,
    )
    config.save_pretrained(tmp_path / "config")
    words = ["checkpoint", "convert", str(tmp_path / "titan")]
    assert main([*words, str(tmp_path / "hf"), "--config-from", str(tmp_path / "config")]) == 0
    assert "torchtitan's llama as that of transformers" in capsys.readouterr().out
    tokens = torch.arange(9) % VOCABULARY
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")(input_ids=tokens[None]).logits[0]
    torch.testing.assert_close(theirs, logits(found, tokens), rtol=1e-4, atol=1e-4)
    assert main([*words, str(tmp_path / "raw.safetensors")]) == 0
    assert "--config-from DIR gives them those of transformers" in capsys.readouterr().out

    config.num_attention_heads = 2
    config.save_pretrained(tmp_path / "other")
    assert main([*words, str(tmp_path / "wrong"), "--config-from", str(tmp_path / "other")]) == 1
    assert ".weight has 16 rows, but" in capsys.readouterr().err
