"""On a GPU: `train.deterministic` gives the same bits again, also in the backward passes of attention."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from onstep.config import ConfigContainer
from onstep.config.load import merge
from onstep.events import CallbackManager
from onstep.training import pretrain
from onstep.training.lifecycle.determinism import only_deterministic

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

GPU = torch.device("cuda", 0)


def gradients(backend: SDPBackend) -> list[torch.Tensor]:
    """Of queries, keys and values, at a length at which flash attention splits the backward pass over blocks."""
    generator = torch.Generator("cuda").manual_seed(0)
    given = [
        torch.randn(2, 8, 2048, 64, device="cuda", dtype=torch.bfloat16, generator=generator).requires_grad_()
        for _ in range(3)
    ]
    with sdpa_kernel(backend):
        scaled_dot_product_attention(*given, is_causal=True).sum().backward()
    return [one.grad for one in given if one.grad is not None]


@pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
def test_backward_passes_of_attention_repeat_their_bits(backend: SDPBackend) -> None:
    with only_deterministic(GPU):
        first = gradients(backend)
        assert len(first) == 3
        for _ in range(5):
            assert all(torch.equal(a, b) for a, b in zip(first, gradients(backend), strict=True))


def test_attention_of_cudnn_is_not_used() -> None:
    refusal = pytest.raises(RuntimeError, match=r"No (available kernel|viable backend)")
    with only_deterministic(GPU), warnings.catch_warnings(), refusal:
        warnings.simplefilter("ignore")  # torch says why
        gradients(SDPBackend.CUDNN_ATTENTION)


@pytest.mark.parametrize("precision", [None, "bf16_mixed"])
def test_two_runs_have_the_same_bits(tiny_config: ConfigContainer, precision: str | None) -> None:
    length = {"model.seq_length": 1024, "dataset.seq_length": 1024, "model.hidden_size": 128}
    merge(tiny_config, {**length, "train.train_iters": 6, "train.deterministic": True, "mixed_precision": precision})
    tiny_config.validation.eval_interval, tiny_config.dist.device = None, "cuda"
    found: list[list[torch.Tensor]] = []
    for _ in range(2):
        manager = CallbackManager()

        def keep(context: Any) -> None:
            found.append([one.detach().cpu().clone() for one in context.model[0].parameters()])

        manager.register("on_train_end", keep)
        pretrain(tiny_config, callbacks=manager)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
