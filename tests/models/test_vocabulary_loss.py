"""The loss in chunks of tokens: its values and gradients are the plain loss's, its memory that of one chunk."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from onstep.config import ModelConfig
from onstep.models import build_transformer, vocabulary_loss
from onstep.models.vocabulary_loss import linear_cross_entropy, logits_cross_entropy
from tests.support.live_bytes import LiveBytes

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}


def inputs(dtype: torch.dtype, tokens: int = 37, width: int = 16, vocabulary: int = 101) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocabulary, width, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, vocabulary, (tokens,), generator=generator)
    labels[::5] = -100
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels


def found(loss: Tensor, *of: Tensor) -> tuple[Tensor, ...]:
    """The loss of uneven weights, and its gradients."""
    weights = torch.arange(1.0, 1.0 + loss.numel(), dtype=loss.dtype).view_as(loss)
    total = (loss * weights * 0.37).sum()
    return loss.detach(), *torch.autograd.grad(total, of)


def assert_close(ours: tuple[Tensor, ...], plain: tuple[Tensor, ...], tolerance: float) -> None:
    for one, other in zip(ours, plain, strict=True):
        assert one.dtype is other.dtype
        assert (one - other).abs().max() <= tolerance * max(1.0, other.abs().max()), (one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("chunk", [1, 8, 37, 100])
def test_losses_and_gradients_are_the_plain_ones(dtype: torch.dtype, reduction: Any, chunk: int) -> None:
    hidden, weight, labels = inputs(dtype)
    plain = cross_entropy(linear(hidden, weight), labels, reduction=reduction)
    ours = linear_cross_entropy(hidden, weight, labels, reduction=reduction, chunk=chunk)
    assert_close(found(ours, hidden, weight), found(plain, hidden, weight), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_losses_of_logits_that_exist_are_the_plain_ones(dtype: torch.dtype) -> None:
    hidden, weight, labels = inputs(torch.float64)
    logits = linear(hidden, weight).detach().to(dtype).requires_grad_()
    wide = torch.promote_types(dtype, torch.float32)
    plain = cross_entropy(logits.to(wide), labels, reduction="sum")
    ours = logits_cross_entropy(logits, labels, chunk=8)
    assert_close(found(ours, logits), found(plain, logits), TOLERANCE.get(dtype, 1e-6))


def test_in_autocast_the_products_are_in_its_dtype_and_the_losses_in_float32() -> None:
    hidden, weight, labels = inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        plain = cross_entropy(linear(hidden, weight).float(), labels, reduction="sum")
        ours = linear_cross_entropy(hidden, weight, labels, chunk=8)
        each = linear_cross_entropy(hidden, weight, labels, reduction="none", chunk=8)
    assert ours.item() == pytest.approx(plain.item(), rel=1e-6)
    assert each.sum().item() == pytest.approx(plain.item(), rel=1e-6)
    assert_close(found(ours, hidden, weight), found(plain, hidden, weight), 1e-2)


def test_labels_that_are_all_ignored_cost_nothing() -> None:
    hidden, weight, labels = inputs(torch.float32)
    loss = linear_cross_entropy(hidden, weight, torch.full_like(labels, -100), chunk=8)
    assert [one.abs().max().item() for one in found(loss, hidden, weight)] == [0.0, 0.0, 0.0]


def test_a_label_outside_the_vocabulary_is_refused() -> None:
    hidden, weight, labels = inputs(torch.float32)
    labels[3] = 101
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        linear_cross_entropy(hidden, weight, labels, chunk=8)


class Head(nn.Module):
    """A head of its own kind."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, vocabulary)

    def forward(self, hidden: Tensor) -> Tensor:
        scores: Tensor = self.inner(hidden) * 0.5
        return scores


def model_of(chunked: bool | None, vocabulary: int = 64, head: str = "own", **options: Any) -> Any:
    config = ModelConfig(
        vocab_size=vocabulary, hidden_size=16, num_layers=1, num_attention_heads=2, seq_length=16, **options
    )
    config.chunked_loss = chunked
    config.share_embeddings_and_output_weights = head == "tied"
    model = build_transformer(config, seed=1)
    if head == "another":
        torch.manual_seed(2)
        model.output = Head(16, vocabulary)
    if head == "biased":
        torch.manual_seed(2)
        model.output = nn.Linear(16, vocabulary)
    return model


def results(model: Any, reduction: str, is_training: bool) -> tuple[Tensor, ...]:
    tokens = torch.randint(0, 64, (3, 16), generator=torch.Generator().manual_seed(3))
    labels = tokens.roll(-1, 1)
    labels[:, 11:] = -100
    model.train(is_training)
    if not is_training:
        with torch.no_grad():
            return (model(tokens, labels, reduction=reduction),)
    loss = model(tokens, labels, reduction=reduction)
    return found(loss, *model.parameters())


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize(
    "options",
    [
        *({"head": head} for head in ("own", "tied", "another", "biased")),
        *({"mtp_num_layers": 1}, {"num_moe_experts": 2}),
    ],
)
def test_a_models_loss_and_gradients_are_the_plain_ones(
    options: dict[str, Any], reduction: str, is_training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = results(model_of(False, **options), reduction, is_training)
    monkeypatch.setattr(vocabulary_loss, "CHUNK_BYTES", 7 * 4 * 64)
    ours = results(model_of(True, **options), reduction, is_training)
    assert_close(ours, plain, 1e-6)


def test_a_small_vocabulary_keeps_its_bits_and_a_head_with_hooks_its_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = results(model_of(False), "sum", True)
    monkeypatch.setattr(vocabulary_loss, "CHUNK_BYTES", 4)
    assert all(map(torch.equal, results(model_of(None), "sum", True), plain))
    hooked, shapes = model_of(True), list[torch.Size]()
    hooked.output.register_forward_hook(lambda module, given, scores: shapes.append(scores.shape))
    assert all(map(torch.equal, results(hooked, "sum", True), plain))
    assert shapes == [(3, 16, 64)]


def memory_of(chunked: bool | None, reduction: str, is_training: bool, **options: Any) -> LiveBytes:
    model = model_of(chunked, vocabulary_loss.LARGE_VOCABULARY, **options)
    with LiveBytes() as memory:
        results(model, reduction, is_training)
    return memory


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize(("reduction", "head"), [("sum", "own"), ("sum", "tied"), ("none", "own"), ("sum", "another")])
def test_a_large_vocabulary_has_the_logits_of_one_chunk(
    reduction: str, head: str, is_training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = 4 * vocabulary_loss.LARGE_VOCABULARY
    logits, weights = 48 * row, 16 * row
    monkeypatch.setattr(vocabulary_loss, "CHUNK_BYTES", 2 * row)
    plain, ours = (memory_of(chunked, reduction, is_training, head=head) for chunked in (False, None))
    assert plain.largest == logits
    assert plain.peak >= 2 * logits
    gradients = 3 * weights if is_training else 0  # of the embedding, of the head, and while they are scaled
    assert ours.largest <= max(weights, 4 * row)
    assert ours.peak <= gradients + 10 * row


def test_what_is_saved_for_the_backward_pass_is_not_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    row, sizes = 4 * vocabulary_loss.LARGE_VOCABULARY, list[int]()
    monkeypatch.setattr(vocabulary_loss, "CHUNK_BYTES", 2 * row)

    def note(tensor: Tensor) -> Tensor:
        sizes.append(tensor.nbytes)
        return tensor

    for chunked, most in ((False, 48), (None, 16)):
        sizes.clear()
        model = model_of(chunked, vocabulary_loss.LARGE_VOCABULARY)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            results(model, "sum", True)
        assert max(sizes) == most * row


@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.slow
def test_a_compiled_model_has_the_same_loss_without_a_break(reduction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = results(model_of(False), reduction, True)
    monkeypatch.setattr(vocabulary_loss, "CHUNK_BYTES", 20 * 4 * 64)
    model = model_of(True)
    torch._dynamo.reset()
    model.compile(backend="aot_eager", fullgraph=True)
    assert_close(results(model, reduction, True), plain, 1e-6)
    torch._dynamo.reset()


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_it_has_a_shape_on_meta(reduction: Any) -> None:
    hidden, weight = (torch.empty(size, 8, device="meta", requires_grad=True) for size in (6, 32))
    labels = torch.empty(6, dtype=torch.int64, device="meta")
    losses = linear_cross_entropy(hidden, weight, labels, reduction=reduction, chunk=2)
    losses.sum().backward()
    assert losses.shape == (() if reduction == "sum" else (6,))
    assert hidden.grad is not None
