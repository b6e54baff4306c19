"""On a GPU: packed documents run torch's kernel without a mask, with memory linear in the length and no wait."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from onstep.config import ModelConfig
from onstep.models import Transformer, build_transformer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

LENGTHS = [140, 3, 1, 60, 308]


def model_of(**changes: Any) -> Transformer:
    sizes = {"num_layers": 2, "hidden_size": 256, "num_attention_heads": 8, "num_query_groups": 2, "vocab_size": 64}
    return build_transformer(ModelConfig(**(sizes | {"seq_length": 8192} | changes)), seed=0).cuda()


def packed(lengths: list[int]) -> tuple[Tensor, dict[str, Any]]:
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    tokens = torch.randint(0, 64, (1, sum(lengths)), generator=torch.Generator().manual_seed(0))
    options = {"document_ids": ids[None].cuda(), "cu_seqlens": bounds.cuda(), "max_seqlen": max(lengths)}
    return tokens.cuda(), options


def gradients(model: Transformer, tokens: Tensor, options: dict[str, Any], dtype: torch.dtype | None) -> list[Tensor]:
    model.zero_grad()
    with torch.autocast("cuda", dtype, enabled=dtype is not None):
        loss = model(tokens, tokens, reduction="sum", **options)
    loss.backward()
    return [loss.detach(), *(one.grad.clone() for one in model.parameters() if one.grad is not None)]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_documents_come_out_as_each_on_its_own(dtype: torch.dtype | None, compiled: bool) -> None:
    model = model_of()
    tokens, options = packed(LENGTHS)
    expected = [torch.zeros((), device="cuda"), *(torch.zeros_like(one) for one in model.parameters())]
    for part in tokens.split(LENGTHS, dim=1):
        for total, found in zip(expected, gradients(model, part, {}, dtype), strict=True):
            total += found

    if compiled:
        model.compile(fullgraph=True)
    found = gradients(model, tokens, options, dtype)

    tolerance = 1e-5 if dtype is None else 2e-2
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).norm() / other.norm()) < tolerance


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_memory_is_linear_in_the_length(dtype: torch.dtype | None) -> None:
    model = model_of()
    peaks = []
    for length in (1024, 2048, 8192):
        tokens, options = packed([length // 2, *[length // 32] * 16])
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        gradients(model, tokens, options, dtype)
        peaks.append(torch.cuda.max_memory_allocated() - before)

    assert peaks[2] < 4.8 * peaks[1]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_step_does_not_wait(dtype: torch.dtype | None, dropout: float) -> None:
    model = model_of(attention_dropout=dropout)
    tokens, options = packed(LENGTHS)
    gradients(model, tokens, options, dtype)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        gradients(model, tokens, options, dtype)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_bfloat16_runs_the_kernel_for_documents() -> None:
    from torch.profiler import ProfilerActivity, profile

    model = model_of()
    tokens, options = packed(LENGTHS)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        gradients(model, tokens, options, torch.bfloat16)

    assert "aten::_flash_attention_forward" in {event.name for event in found.events()}
