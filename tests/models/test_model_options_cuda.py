"""On a GPU: the options give the numbers of the CPU, recomputing the same bits, and nothing waits for the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from onstep.config import ModelConfig
from onstep.models import Transformer, build_transformer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "gpt2": {
        "normalization": "LayerNorm",
        "position_embedding_type": "learned_absolute",
        "gated_linear_unit": False,
        "activation_func": "gelu_tanh",
        "add_bias_linear": True,
        "add_qkv_bias": True,
    },
    "qwen3": {"qk_layernorm": True, "num_query_groups": 2},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
}
EVERY_OPTION = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def model_of(options: dict[str, Any], **changes: Any) -> Transformer:
    sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 31, "seq_length": 32}
    return build_transformer(ModelConfig(**(sizes | {"init_method_std": 0.1} | options | changes)), seed=0)


def some_tokens(seed: int = 0) -> Tensor:
    return torch.randint(0, 31, (4, 32), generator=torch.Generator().manual_seed(seed))


def documents() -> Tensor:
    return torch.tensor([[0] * 10 + [1] * 22, [0] * 32, [0, 1] + [2] * 30, [0] * 31 + [1]])


@EVERY_OPTION
@pytest.mark.parametrize("packed", [False, True])
def test_losses_and_the_largest_logit_are_those_of_the_cpu(options: dict[str, Any], packed: bool) -> None:
    model = model_of(options, log_max_attention_logit=True).double()
    ids = documents() if packed else None
    expected, logit = model(some_tokens(), some_tokens(1), document_ids=ids), model.max_attention_logit
    model.cuda()

    found = model(some_tokens().cuda(), some_tokens(1).cuda(), document_ids=None if ids is None else ids.cuda())

    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=1e-5)
    assert model.max_attention_logit is not None
    torch.testing.assert_close(model.max_attention_logit.cpu(), logit)


@EVERY_OPTION
def test_recomputing_gives_the_same_bits_with_dropout_under_autocast(options: dict[str, Any]) -> None:
    def gradients(granularity: str | None) -> list[Tensor]:
        changes = {"hidden_dropout": 0.2, "attention_dropout": 0.1, "recompute_granularity": granularity}
        model = model_of(options, **changes).cuda()
        torch.manual_seed(3)
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(some_tokens().cuda(), some_tokens(1).cuda(), reduction="sum")
        loss.backward()
        return [loss.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]

    kept, recomputed = gradients(None), gradients("full")

    assert len(kept) == len(recomputed)
    assert all(torch.equal(one, other) for one, other in zip(kept, recomputed, strict=True))


@EVERY_OPTION
def test_a_packed_step_does_not_wait_for_the_device(options: dict[str, Any]) -> None:
    model = model_of(options, log_max_attention_logit=True).cuda()
    tokens, ids = some_tokens().cuda(), documents().cuda()
    model(tokens, tokens, document_ids=ids, reduction="sum").backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(tokens, tokens, document_ids=ids, reduction="sum").backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
