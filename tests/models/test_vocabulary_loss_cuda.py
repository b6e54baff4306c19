"""What only a GPU can show: the memory of the loss in chunks, and its values in bfloat16 and in compiled code."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy, linear

from onstep.models import linear_cross_entropy, vocabulary_loss
from tests.models.test_vocabulary_loss import assert_close, found, inputs, model_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

VOCABULARY, TOKENS = 131_072, 8192
LOGITS_BYTES = 4 * VOCABULARY * TOKENS


def peak_of(chunked: bool | None, is_training: bool, *, compiled: bool = False) -> tuple[float, int]:
    model = model_of(chunked, VOCABULARY, position_embedding_type="rope").cuda().train(is_training)
    if compiled:
        model.compile()
    tokens = torch.randint(0, VOCABULARY, (TOKENS // 16, 16), device="cuda", generator=torch.Generator("cuda"))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.set_grad_enabled(is_training), torch.autocast("cuda", torch.bfloat16):
        loss = model(tokens, tokens.roll(-1, 1), reduction="sum")
    if is_training:
        loss.backward()
    return loss.item() / TOKENS, torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("is_training", [True, False])
def test_the_peak_is_that_of_a_chunk(is_training: bool) -> None:
    plain, plain_bytes = peak_of(False, is_training)
    ours, our_bytes = peak_of(None, is_training)
    assert ours == pytest.approx(plain, rel=1e-4)
    assert plain_bytes > 1.5 * LOGITS_BYTES
    assert our_bytes < 3 * vocabulary_loss.CHUNK_BYTES


def test_compiled_code_has_the_same_loss_and_no_larger_peak() -> None:
    torch._dynamo.reset()
    plain, _ = peak_of(False, True)
    ours, our_bytes = peak_of(None, True, compiled=True)
    assert ours == pytest.approx(plain, rel=1e-3)
    assert our_bytes < 4 * vocabulary_loss.CHUNK_BYTES


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_losses_and_gradients_are_the_plain_ones(dtype: torch.dtype) -> None:
    hidden, weight, labels = (one.detach().cuda() for one in inputs(dtype))
    of = hidden.requires_grad_(), weight.requires_grad_()
    plain = cross_entropy(linear(*of), labels, reduction="sum")
    ours = linear_cross_entropy(*of, labels, chunk=8)
    assert_close(found(ours, *of), found(plain, *of), 1e-5 if dtype is torch.float32 else 1e-12)
