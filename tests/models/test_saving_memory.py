"""Recomputed and offloaded activations, and losses that never have all logits: the same results from less memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from onstep import Trainer, TrainingArguments, pretrain
from onstep.config import ConfigContainer, ModelConfig
from onstep.errors import ConfigError
from onstep.models import build_transformer, vocabulary_loss
from onstep.models.hf import deferred_logits
from onstep.models.hf.causal_lm import CausalLM
from onstep.models.hf.causal_loss import causal_loss_in_chunks
from onstep.models.hf.deferred_logits import DeferredLogits
from onstep.models.offloading import OffloadedActivations
from onstep.trainer.computing.model_options import memory_options
from tests.support.live_bytes import LiveBytes

TOKENS = torch.arange(256).view(4, 64) % 48
RECOMPUTED = [
    {"recompute_granularity": "selective"},
    {"recompute_granularity": "selective", "recompute_interval": 2},
    {"recompute_granularity": "full", "recompute_interval": 2},
    {"recompute_granularity": "full"},
]
VOCABULARY = 96
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2, "head_dim": 16}


def own_model(**options: Any) -> nn.Module:
    return build_transformer(
        ModelConfig(num_layers=4, hidden_size=32, num_attention_heads=2, vocab_size=48, seq_length=64, **options),
        seed=0,
    )


def their_model(kind: str = "Llama", **options: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(vocab_size=VOCABULARY, num_key_value_heads=2, **SIZES)
    return getattr(transformers, f"{kind}ForCausalLM")(config).train()


def held(loss: Any) -> tuple[int, Tensor]:
    """The bytes that a forward pass leaves for the backward pass, and the loss."""
    with LiveBytes() as live:
        value = loss()
        kept = live.now
        value.backward()
    return kept, value.detach()


def test_layers_hold_less_the_more_is_recomputed_and_results_stay() -> None:
    def measured(**options: Any) -> tuple[int, list[Tensor]]:
        model = own_model(**options)
        kept, loss = held(lambda: model(TOKENS, TOKENS, reduction="sum"))
        return kept, [loss, *(param.grad for param in model.parameters() if param.grad is not None)]

    everything, exact = measured()
    sizes = [everything]
    for options in (RECOMPUTED[1], RECOMPUTED[0], RECOMPUTED[3]):
        kept, values = measured(**options)
        assert all(torch.equal(one, other) for one, other in zip(values, exact, strict=True)), options
        sizes.append(kept)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 1.5 * sizes[-1]
    half, values = measured(**RECOMPUTED[2])
    assert sizes[-1] < half < everything


def test_models_of_transformers_recompute_the_same_way() -> None:
    kept = []
    for options in ({}, *RECOMPUTED):
        theirs = CausalLM(ModelConfig(seq_length=64, **options), their_model()).train()
        kept.append(held(lambda model=theirs: model(TOKENS, TOKENS, reduction="sum")))
    sizes, losses = [size for size, _ in kept], [loss for _, loss in kept]
    assert all(torch.equal(one, losses[0]) for one in losses)
    assert sizes[0] > max(sizes[1:])
    assert sizes[4] < min(sizes[:4])


def test_offloaded_activations_come_back_and_weights_stay() -> None:
    exact, model = own_model(), own_model(recompute_granularity="full")
    exact(TOKENS, TOKENS, reduction="sum").backward()
    offloaded = OffloadedActivations(model, device="cpu")
    with offloaded:
        loss = model(TOKENS, TOKENS, reduction="sum")
    loss.backward()
    assert offloaded.num_bytes == 0, "smaller than what is worth a copy"
    wide = nn.Linear(256, 256)
    x = torch.randn(256, 256, requires_grad=True)
    offloaded = OffloadedActivations(wide, device="cpu")
    with offloaded:
        out = wide(x).exp()
    out.sum().backward()
    assert offloaded.num_bytes == 2 * x.nbytes, "the input and the result, not the weight"
    torch.testing.assert_close(x.grad, out.detach() @ wide.weight)
    for one, other in zip(model.parameters(), exact.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary_loss, "CHUNK_BYTES", 4 * VOCABULARY * 10)


class Largest(TorchDispatchMode):
    """The most rows of logits that existed at once."""

    rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.shape[-1:] == (VOCABULARY,) and result.shape != (32, VOCABULARY):
            self.rows = max(self.rows, result.numel() // VOCABULARY)
        return result


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(("kind", "rows"), [("Llama", 10), ("Gemma2", 256)])
def test_logits_of_their_models_exist_in_chunks_unless_the_model_needs_them(kind: str, rows: int) -> None:
    found = []
    for chunked in (False, True):
        model = their_model(kind)
        with Largest() as largest, causal_loss_in_chunks(model, ModelConfig(chunked_loss=chunked)):
            output = model(input_ids=TOKENS, labels=TOKENS)
            output.loss.backward()
        found.append((largest.rows, output, [param.grad for param in model.parameters()]))
    (all_rows, exact, exact_grads), (few, chunked_output, grads) = found
    assert (all_rows, few) == (256, rows)
    assert isinstance(chunked_output.logits, DeferredLogits) is (kind == "Llama")
    assert chunked_output.logits.shape == exact.logits.shape
    assert torch.equal(chunked_output.logits.argmax(-1), exact.logits.argmax(-1)), "whoever reads them gets them"
    torch.testing.assert_close([chunked_output.loss, *grads], [exact.loss, *exact_grads])
    assert "forward" not in vars(model.get_output_embeddings())


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_a_family_of_the_command_line_has_the_loss_in_chunks_too(reduction: Any) -> None:
    losses = []
    for chunked in (False, True):
        model = CausalLM(ModelConfig(seq_length=64, chunked_loss=chunked), their_model()).train()
        with Largest() as largest:
            loss = model(TOKENS, TOKENS, reduction=reduction)
            loss.sum().backward()
        losses.append((largest.rows, loss, model.model.lm_head.weight.grad))
    assert losses[0][0] == 256
    assert losses[1][0] <= 10
    torch.testing.assert_close(losses[0][1:], losses[1][1:])


@pytest.fixture
def trained(tmp_path: Path) -> Any:
    def train(model: Any, **keys: Any) -> None:
        rows = [{"input_ids": row, "labels": row} for row in TOKENS]
        overrides = {"run.save_weights": False, **{f"model.{key}": value for key, value in keys.items()}}
        arguments = TrainingArguments(
            tmp_path, max_steps=1, save_strategy="no", report_to="none", config_overrides=overrides
        )
        Trainer(model=model, args=arguments, train_dataset=rows).train()

    return train


def test_a_trainer_reads_the_same_keys(trained: Any) -> None:
    model = their_model()
    trained(model, recompute_granularity="full", recompute_interval=2)
    assert [layer.gradient_checkpointing for layer in model.model.layers] == [True, False, True, False]
    own = own_model()
    with memory_options(own, ModelConfig(recompute_granularity="selective", recompute_interval=2)):
        assert (own.config.recompute_granularity, own.config.recompute_interval) == ("selective", 2)
    with pytest.raises(ConfigError, match="gradient_checkpointing_enable, which Linear does not have"):
        trained(nn.Linear(2, 2), recompute_granularity="full")
    with pytest.raises(ConfigError, match="this run computes on cpu"):
        trained(model, offload_activations=True)


def test_what_needs_a_gpu_is_refused_without_one(tiny_config: ConfigContainer) -> None:
    tiny_config.model.offload_activations = True
    with pytest.raises(ConfigError, match=r"model\.offload_activations=true moves .* set it to false"):
        pretrain(tiny_config)
    tiny_config.model.offload_activations, tiny_config.model.fused_linear_loss = False, True
    with pytest.raises(ConfigError, match=r"model\.fused_linear_loss=true requires a GPU, .* set it to false"):
        pretrain(tiny_config)


def test_deferred_logits_are_computed_for_everything_else() -> None:
    hidden, weight = torch.randn(2, 3, 8), torch.randn(5, 8)
    logits = deferred_logits.DeferredLogits(hidden, weight)
    assert (logits.shape, logits.dtype, logits.ndim, len(logits)) == (torch.Size([2, 3, 5]), torch.float32, 3, 2)
    assert type(logits + 1) is type(logits[0]) is Tensor
    torch.testing.assert_close(logits.softmax(-1), (hidden @ weight.T).softmax(-1))
    assert logits.in_float32().dtype is torch.float32
