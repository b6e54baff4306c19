"""Attention within the documents of long packed sequences: numbers, gradients, memory, dropout, kernels."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from onstep.config import ModelConfig
from onstep.errors import ConfigError
from onstep.models import Transformer, build_transformer
from onstep.models.layers import documents, query_blocks, varlen
from onstep.models.layers.query_blocks import attend_in_blocks

LENGTHS = ([140, 3, 1, 60, 56], [5, 120, 135], [260])
"""Documents of the sequences of a batch: longer than a block, short ones, one that fills a sequence."""


def model_of(**changes: Any) -> Transformer:
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 31, "seq_length": 4096}
    return build_transformer(ModelConfig(**(sizes | {"init_method_std": 0.1} | changes)), seed=0)


def some_tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 31, (batch, length), generator=torch.Generator().manual_seed(seed))


def ids_of(lengths: Any = LENGTHS) -> Tensor:
    return torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths])


def losses_and_gradients(model: Any, *inputs: Tensor, **options: Any) -> list[Tensor]:
    model.zero_grad()
    losses = model(*inputs, **options)
    losses.sum().backward()
    return [losses.detach(), *(one.grad.clone() for one in model.parameters())]


def alone(model: Any, tokens: Tensor, labels: Tensor, lengths: Any = LENGTHS) -> list[Tensor]:
    model.zero_grad()
    losses = torch.zeros(tokens.shape)
    for row, sizes in enumerate(lengths):
        start = 0
        for size in sizes:
            own = slice(start, start + size)
            found = model(tokens[row : row + 1, own], labels[row : row + 1, own])
            found.sum().backward()
            losses[row, own] = found.detach()
            start += size
    return [losses, *(one.grad.clone() for one in model.parameters())]


def assert_close(found: list[Tensor], expected: list[Tensor], atol: float = 1e-5) -> None:
    """Within `atol` of the largest element of each gradient, or of the losses."""
    for one, other in zip(found, expected, strict=True):
        scale = max(1.0, float(other.abs().max()))
        torch.testing.assert_close(one, other, rtol=0, atol=atol * scale)


@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("way", ["eager", "recompute", "learned", "logits"])
def test_long_packed_documents_come_out_as_each_on_its_own(way: str, groups: int) -> None:
    options = {
        "recompute": {"recompute_granularity": "full"},
        "learned": {"position_embedding_type": "learned_absolute"},
        "logits": {"log_max_attention_logit": True},
    }
    model = model_of(num_query_groups=groups, **options.get(way, {}))
    tokens, labels = some_tokens(3, 260), some_tokens(3, 260, seed=1)

    assert_close(losses_and_gradients(model, tokens, labels, document_ids=ids_of()), alone(model, tokens, labels))


@pytest.mark.slow
def test_a_compiled_model_gives_the_same_numbers_in_one_graph() -> None:
    model, lengths = model_of(num_layers=1, num_query_groups=2), [[700, 3, 1, 400, 96]]
    tokens = some_tokens(1, 1200)
    expected = alone(model, tokens, tokens, lengths)

    model.compile(backend="aot_eager", fullgraph=True)

    assert_close(losses_and_gradients(model, tokens, tokens, document_ids=ids_of(lengths)), expected)


def test_a_compiled_layer_is_not_compiled_again_for_other_documents() -> None:
    model, graphs = model_of(num_layers=1), []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    model.layers[0].compile(backend=backend)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for lengths in ([[260]], [[100, 160]], [[20] * 13]):
            model(some_tokens(1, 260), document_ids=ids_of(lengths))

    assert len(graphs) == 1


def test_the_depths_of_multi_token_prediction_see_one_document() -> None:
    model = model_of(mtp_num_layers=2)
    tokens, labels = some_tokens(3, 260), some_tokens(3, 260, seed=1)

    assert_close(losses_and_gradients(model, tokens, labels, document_ids=ids_of()), alone(model, tokens, labels))


def test_a_document_is_a_run_of_equal_ids() -> None:
    model = model_of(mtp_num_layers=2)
    for length in (12, 300):
        tokens, runs = some_tokens(1, length), ids_of([[length - 3, 1, 2]])
        again = runs % 2
        pairs = [losses_and_gradients(model, tokens, tokens, document_ids=ids) for ids in (runs, again)]
        assert all(torch.equal(one, other) for one, other in zip(*pairs, strict=True))


def saved_bytes(model: Transformer, length: int) -> int:
    """Bytes of the different storages that one pass keeps for its backward pass."""
    tokens, ids = some_tokens(1, length), ids_of([[length // 2, *[length // 32] * 16]])
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(tokens, tokens, reduction="sum", document_ids=ids)
    return sum(one.untyped_storage().nbytes() for one in kept.values())


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_memory_is_linear_in_the_length(dropout: float) -> None:
    model = model_of(num_query_groups=2, attention_dropout=dropout)
    weights = sum(one.numel() * one.element_size() for one in model.parameters())

    short, long = (saved_bytes(model, length) - weights for length in (512, 2048))

    assert short < long < 4.4 * short


@pytest.mark.parametrize("length", [140, 300])
def test_blocks_give_the_numbers_of_a_mask(length: int) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, length, 4, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    key, value = (
        torch.randn(2, length, 2, 8, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(2)
    )
    weights = torch.randn(2, length, 4, 8, generator=generator, dtype=torch.float64)
    first = torch.tensor([[0] * 120 + [120] * (length - 120), [0] * length])
    mask = (torch.arange(length) >= first[:, :, None]).tril().unsqueeze(1)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), mask, enable_gqa=True
    ).transpose(1, 2)

    found = attend_in_blocks(query, key, value, first)

    torch.testing.assert_close(found, expected)
    inputs = (query, key, value)
    for pair in zip(*(torch.autograd.grad((one * weights).sum(), inputs) for one in (found, expected)), strict=True):
        torch.testing.assert_close(*pair)


def test_dropout_has_the_gradients_of_what_it_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query_blocks, "_MOST_ROWS", 4)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, 10, heads, 3, generator=generator, dtype=torch.float64, requires_grad=True)
        for heads in (4, 2, 2)
    )
    first = torch.tensor([[0] * 6 + [6] * 4, [0] * 10])

    def attended(*inputs: Tensor) -> Tensor:
        torch.manual_seed(7)
        return attend_in_blocks(*inputs, first, dropout_p=0.3)

    assert torch.autograd.gradcheck(attended, (query, key, value))
    assert not torch.equal(attended(query, key, value), attend_in_blocks(query, key, value, first, dropout_p=0.3))


def test_dropout_keeps_the_mean_and_other_documents_away() -> None:
    value = torch.ones(1, 300, 2, 4)
    value[:, 150:] = 3.0
    first = torch.tensor([[0] * 150 + [150] * 150])
    query = torch.zeros(1, 300, 2, 4)

    means = torch.stack([attend_in_blocks(query, query, value, first, dropout_p=0.5) for _ in range(20)]).mean(0)

    torch.testing.assert_close(means[:, 50:150].mean(), torch.tensor(1.0), rtol=0.1, atol=0)
    torch.testing.assert_close(means[:, 200:].mean(), torch.tensor(3.0), rtol=0.1, atol=0)


def test_recomputing_and_evaluation_with_dropout() -> None:
    tokens, ids = some_tokens(3, 260), ids_of()

    def run(granularity: str | None) -> list[Tensor]:
        model = model_of(attention_dropout=0.2, hidden_dropout=0.1, recompute_granularity=granularity)
        torch.manual_seed(3)
        return losses_and_gradients(model, tokens, tokens, document_ids=ids)

    assert all(torch.equal(one, other) for one, other in zip(run(None), run("full"), strict=True))
    with_dropout, without = (model_of(attention_dropout=one).eval() for one in (0.2, 0.0))
    assert torch.equal(with_dropout(tokens, document_ids=ids), without(tokens, document_ids=ids))


def test_nothing_waits_for_a_device() -> None:
    model = model_of(num_query_groups=2, attention_dropout=0.1).to("meta")
    tokens, ids = some_tokens(3, 260).to("meta"), ids_of().to("meta")

    model(tokens, tokens, reduction="sum", document_ids=ids).backward()  # reading a meta tensor raises

    assert all(one.grad is not None for one in model.parameters())


class Kernel:
    """Stands in for torch's kernel of CUDA, and checks what that requires."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[int], int]] = []

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        *,
        window_size: tuple[int, int],
        enable_gqa: bool,
    ) -> Tensor:
        assert cu_seq_q is cu_seq_k
        assert cu_seq_q.dtype == torch.int32
        assert max_q == max_k
        assert window_size == (-1, 0)
        assert enable_gqa == (query.shape[1] != key.shape[1])
        bounds = cu_seq_q.tolist()
        self.calls.append((bounds, max_q))
        attended = torch.empty_like(query)
        for start, end in pairwise(bounds):
            assert end - start <= max_q
            q, k, v = (x[start:end].transpose(0, 1) for x in (query, key, value))
            found = torch.nn.functional.scaled_dot_product_attention(
                q[None], k[None], v[None], is_causal=True, enable_gqa=enable_gqa
            )
            attended[start:end] = found[0].transpose(0, 1)
        return attended


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    found = Kernel()
    monkeypatch.setattr(varlen, "varlen_attn", found)
    monkeypatch.setattr(documents, "has_kernel", lambda query: True)
    return found


@pytest.mark.parametrize("groups", [4, 2])
def test_boundaries_without_a_mask_give_the_same_numbers(kernel: Kernel, groups: int) -> None:
    model = model_of(num_query_groups=groups)
    tokens, ids = some_tokens(3, 260), ids_of()
    bounds = torch.tensor([0, 140, 143, 144, 204, 260, 265, 385, 520, 780, 780, 780], dtype=torch.int32)

    found = losses_and_gradients(model, tokens, tokens, document_ids=ids, cu_seqlens=bounds, max_seqlen=264)

    assert kernel.calls == [(bounds.tolist(), 264)] * 2
    assert_close(found, alone(model, tokens, tokens))
    assert len(kernel.calls) == 2
    model(tokens, document_ids=ids, cu_seqlens=bounds)
    assert kernel.calls[-1] == (bounds.tolist(), 260)


def test_dropout_does_without_the_kernel_that_has_none(kernel: Kernel) -> None:
    tokens, bounds = some_tokens(3, 260), torch.tensor([0, 260, 520, 780], dtype=torch.int32)

    model_of(attention_dropout=0.1)(tokens, document_ids=torch.zeros_like(tokens), cu_seqlens=bounds)

    assert kernel.calls == []


def test_the_kernel_is_not_asked_where_there_is_none() -> None:
    query = torch.zeros(1, 2, 2, 8, dtype=torch.bfloat16)

    assert not varlen.runs_varlen(query)


def test_boundaries_require_documents() -> None:
    with pytest.raises(ConfigError, match="cu_seqlens requires document_ids"):
        model_of()(some_tokens(1, 3), cu_seqlens=torch.tensor([0, 3], dtype=torch.int32))
