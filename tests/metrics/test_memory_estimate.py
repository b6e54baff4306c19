"""The estimate of a training's memory: exact for weights, gradients and optimizer, near the truth for activations."""

from __future__ import annotations

import math
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from onstep.config import ConfigContainer, ModelConfig
from onstep.config.parallel_sizes import ParallelSizes
from onstep.distributed.pipeline.seats import seats_of_rank
from onstep.distributed.tensor_parallel import TensorRanks
from onstep.metrics import estimate_training_memory, format_training_memory_estimate
from onstep.metrics.memory import activations
from onstep.metrics.memory.estimate import rank_estimates
from onstep.models import Transformer, build_transformer, transformer, vocabulary_loss
from onstep.models.offloading import OffloadedActivations
from onstep.models.stages import TransformerStage, cut
from onstep.models.tensor_plan import plan_of
from onstep.optim import build_optimizer
from onstep.recipes import get_recipe
from onstep.training.profiling.live_memory import COPIES, LiveMemory
from onstep.training.setup.lora import add_lora
from onstep.training.setup.weight_types import set_weight_types

SIZES = {"hidden_size": 128, "ffn_hidden_size": 512, "num_attention_heads": 4, "vocab_size": 500, "seq_length": 128}
FLOAT32, MASTERS = ("float32", "float32", "stochastic"), ("bfloat16", "float32", "stochastic")
STOCHASTIC, KAHAN = ("bfloat16", "bfloat16", "stochastic"), ("bfloat16", "bfloat16", "kahan")
EXPERTS = {"num_moe_experts": 4, "moe_ffn_hidden_size": 64}


def config_of(precision: str | None = None, **model: Any) -> ConfigContainer:
    config = ConfigContainer(model=ModelConfig(**{"num_layers": 2, **SIZES, **model}), mixed_precision=precision)
    config.train.micro_batch_size, config.optimizer.lr = 2, 1e-3
    return config


def built(config: ConfigContainer) -> Transformer:
    model = build_transformer(config.model, seed=0)
    if config.peft.peft_scheme is not None:
        add_lora(model, config.peft, seed=0)
    set_weight_types([model], config)
    return model


def held(config: ConfigContainer) -> int:
    """Bytes of weights, masters, gradients and optimizer state after a step."""
    model = built(config)
    optimizer = build_optimizer([model], config.optimizer)
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    model(tokens, tokens, reduction="sum").backward()
    optimizer.step()
    inner = optimizer.state_dict()
    state = [value for one in inner["state"].values() for value in one.values()]
    tensors = [value for value in state if isinstance(value, torch.Tensor) and value.numel() > 1]
    tensors += [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)]
    return sum(tensor.nbytes for tensor in tensors)


def kept(config: ConfigContainer) -> Counter[str]:
    """Bytes by kind when the backward pass begins, of a model on the CPU."""
    model = built(config)
    meter = LiveMemory(SIZES["vocab_size"])
    meter.assign("weights, trained", [*model.parameters(), *model.buffers()])
    tokens = torch.zeros(2, SIZES["seq_length"], dtype=torch.int64)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=config.mixed_precision is not None)
    meter.assign("data", [tokens])
    with meter:
        meter.is_forward = True
        with autocast:
            loss = model(tokens, labels=tokens, reduction="sum")
        loss.backward()
    return meter.kept | Counter({COPIES: meter.most[COPIES]})


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "muon"])
@pytest.mark.parametrize("scheme", [None, "lora"])
@pytest.mark.parametrize("options", [{}, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("types", [FLOAT32, MASTERS, STOCHASTIC, KAHAN], ids=["float32", "masters", "pure", "kahan"])
def test_weights_gradients_and_optimizer_are_what_a_step_leaves(
    optimizer: str, scheme: str | None, options: dict[str, Any], types: tuple[str, str, str]
) -> None:
    config = config_of(**options)
    config.optimizer.optimizer, config.peft.peft_scheme = optimizer, scheme
    config.optimizer.params_dtype, config.optimizer.main_params_dtype, config.optimizer.rounding = types
    estimate = estimate_training_memory(config)
    assert estimate is not None
    assert estimate.weights_and_optimizer == held(config)
    assert (estimate.num_trainable < estimate.num_parameters) == (scheme == "lora")


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # of the norms of queries and keys
@pytest.mark.parametrize("scheme", [None, "lora"])
@pytest.mark.parametrize(("precision", "types"), [(None, FLOAT32), ("bf16_mixed", FLOAT32), ("bf16_mixed", MASTERS)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_query_groups": 1, "qk_layernorm": True},
        {"recompute_granularity": "full"},
        {"gated_linear_unit": False, "activation_func": "gelu", "normalization": "LayerNorm", "add_bias_linear": True},
    ],
    ids=["dense", "grouped", "recomputed", "not-gated"],
)
def test_activations_and_copies_are_what_is_kept(
    scheme: str | None, precision: str | None, types: tuple[str, str, str], options: dict[str, Any]
) -> None:
    config = config_of(precision, **options)
    config.peft.peft_scheme = scheme
    config.optimizer.params_dtype, config.optimizer.main_params_dtype, config.optimizer.rounding = types
    estimate, found = estimate_training_memory(config, device="cpu"), kept(config)
    assert estimate is not None
    assert estimate.activations == pytest.approx(found["activations"], abs=8)  # the loss itself
    if scheme is None:
        assert estimate.weight_copies == found[COPIES]


@pytest.mark.parametrize("precision", [None, "bf16_mixed"])
def test_activations_of_experts_are_within_a_seventh(precision: str | None) -> None:
    two, four = (config_of(precision, **EXPERTS, num_layers=n) for n in (2, 4))
    sizes = [estimate_training_memory(config, device="cpu") for config in (two, four)]
    assert sizes[0] is not None
    assert sizes[1] is not None
    estimated = sizes[1].activations - sizes[0].activations
    assert estimated == pytest.approx(kept(four)["activations"] - kept(two)["activations"], rel=1 / 7)


def test_recomputed_layers_keep_their_input_only() -> None:
    whole, recomputed = (
        [estimate_training_memory(config_of(recompute_granularity=how, num_layers=n), device="cpu") for n in (8, 9)]
        for how in (None, "full")
    )
    tokens = 2 * SIZES["seq_length"]
    assert whole[0] is not None
    assert recomputed[0] is not None
    assert recomputed[1] is not None
    assert recomputed[1].activations - recomputed[0].activations == tokens * 4 * SIZES["hidden_size"]
    assert recomputed[0].activations < whole[0].activations / 3
    assert recomputed[0].weights_and_optimizer == whole[0].weights_and_optimizer


def test_activations_grow_with_the_micro_batch_and_nothing_else_does() -> None:
    config = config_of("bf16_mixed")
    one = estimate_training_memory(config)
    config.train.micro_batch_size = 6
    three = estimate_training_memory(config)
    assert one is not None
    assert three is not None
    assert three.activations == pytest.approx(3 * one.activations, rel=1e-4)
    assert (three.logits, three.temporary) == (3 * one.logits, 3 * one.temporary)
    assert three.held == one.held


def test_the_table_has_a_line_for_each_kind_that_there_is() -> None:
    config = config_of("bf16_mixed")
    config.peft.peft_scheme = "lora"
    estimate = estimate_training_memory(config)
    assert estimate is not None
    lines = format_training_memory_estimate(estimate).splitlines()
    names = ["parameters", "trained", *(name for name, size in estimate.kinds.items() if size), "total"]
    assert [line[:16].strip() for line in lines] == names
    parts = [float(line.split()[-2].replace(",", "")) for line in lines[2:]]
    assert max(parts[:-1]) < parts[-1] <= sum(parts[:-1])


def peaks(config: ConfigContainer, micro_batches: int) -> int:
    """The most bytes that two steps on the CPU need at once."""
    model = built(config)
    optimizer, meter = build_optimizer([model], config.optimizer), LiveMemory(config.model.vocab_size or 0)
    meter.assign("weights, trained", [*model.parameters(), *model.buffers()])
    tokens = torch.randint(0, 64, (2, SIZES["seq_length"]))
    with meter:
        for _ in range(2):
            optimizer.zero_grad()
            for _ in range(micro_batches):
                with torch.autocast("cpu", torch.bfloat16, enabled=config.mixed_precision is not None):
                    loss = model(tokens, labels=tokens, reduction="sum")
                loss.backward()
            optimizer.step()
    return meter.peak.total()


@pytest.mark.parametrize("scheme", [None, "lora"])
@pytest.mark.parametrize(
    ("options", "micro_batches"),
    [
        ({}, 1),
        ({}, 2),
        ({"num_layers": 6, "recompute_granularity": "full"}, 1),
        ({"vocab_size": 8192}, 2),
        ({"vocab_size": 8192, "share_embeddings_and_output_weights": True}, 1),
    ],
    ids=["one", "accumulated", "recomputed", "large-vocabulary", "tied"],
)
def test_the_total_is_near_the_peak_of_a_step(scheme: str | None, options: dict[str, Any], micro_batches: int) -> None:
    config = config_of("bf16_mixed", **options)
    config.train.global_batch_size, config.peft.peft_scheme = 2 * micro_batches, scheme
    estimate = estimate_training_memory(config, device="cpu")
    assert estimate is not None
    assert estimate.total == pytest.approx(peaks(config, micro_batches), rel=0.05)


@pytest.mark.parametrize("scheme", [None, "lora"])
def test_a_loss_in_chunks_needs_the_logits_of_one(scheme: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("bf16_mixed", vocab_size=3000, chunked_loss=True)
    config.peft.peft_scheme = scheme
    for name, size in (("CHUNK_BYTES", 4 * 3000 * 64), ("FROZEN_CHUNK_BYTES", 4 * 3000 * 16)):
        monkeypatch.setattr(vocabulary_loss, name, size)
    monkeypatch.setattr(activations, "_CHUNK", 3000 * 64)
    monkeypatch.setattr(activations, "_FROZEN_CHUNK", 3000 * 16)
    estimate = estimate_training_memory(config, device="cpu")
    assert estimate is not None
    head, hidden = 4 * 3000 * SIZES["hidden_size"], 2 * 2 * SIZES["seq_length"] * SIZES["hidden_size"]
    assert estimate.logits == (head + 6 * 3000 * 64 if scheme is None else 6 * 3000 * 16) + hidden
    assert estimate.total == pytest.approx(peaks(config, 1), rel=0.05)


@pytest.mark.parametrize("types", [MASTERS, STOCHASTIC, KAHAN], ids=["masters", "pure", "kahan"])
def test_the_update_of_bfloat16_weights_is_the_peak_of_a_short_sequence(types: tuple[str, str, str]) -> None:
    config = config_of(hidden_size=256, ffn_hidden_size=1024, seq_length=16)
    config.optimizer.params_dtype, config.optimizer.main_params_dtype, config.optimizer.rounding = types
    estimate = estimate_training_memory(config, device="cpu")
    assert estimate is not None
    assert estimate.total > 2 * (estimate.held + estimate.gradients)
    assert estimate.total == pytest.approx(peaks(config, 1), rel=0.05)


@pytest.mark.parametrize(
    ("optimizer", "bytes_per_weight", "of_embedding"),
    [
        ("adamw_8bit", 2 + 2 * 4 / 256, 8),
        ("lion_8bit", 1 + 4 / 256, 4),
        ("lion_32bit", 4, 4),
        ("ademamix", 12, 12),
        ("adamw_torch_8bit", 2 + 2 * 4 / 256, 2 + 2 * 4 / 256),
        ("adamw_torch_4bit", 1 + 2 * 4 / 128, 1 + 2 * 4 / 128),
        ("paged_adamw_32bit", 0, 0),
    ],
)
def test_optimizers_of_packages_are_counted_and_paged_ones_are_not(
    optimizer: str, bytes_per_weight: float, of_embedding: float
) -> None:
    config = config_of()
    config.optimizer.optimizer = optimizer
    estimate = estimate_training_memory(config)
    assert estimate is not None
    embedding = config.model.vocab_size * config.model.hidden_size
    rest = estimate.num_trainable - embedding
    assert estimate.optimizer == pytest.approx(bytes_per_weight * rest + of_embedding * embedding, rel=1e-3)


def test_offloaded_activations_are_counted_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    estimates = []
    for offloads in (False, True):
        config = config_of(
            "bf16_mixed", num_layers=3, recompute_granularity="full", seq_length=256, offload_activations=offloads
        )
        estimate = estimate_training_memory(config)
        assert estimate is not None
        estimates.append(estimate)
    model = Transformer(config.model)
    moved = OffloadedActivations(model, device="cpu")
    monkeypatch.setattr(transformer, "offloading", lambda module, config: moved)
    tokens = torch.zeros(config.train.micro_batch_size, config.model.seq_length, dtype=torch.int64)
    with torch.autocast("cpu", torch.bfloat16):
        model(tokens, labels=tokens, reduction="sum")
    here, there = estimates
    assert there.on_host == moved.num_bytes > 0
    assert there.activations == here.activations - there.on_host
    assert "on the host" in format_training_memory_estimate(there)


def test_the_sizes_of_chunks_are_those_of_the_loss() -> None:
    assert activations._CHUNK == vocabulary_loss.CHUNK_BYTES // 4
    assert activations._FROZEN_CHUNK == vocabulary_loss.FROZEN_CHUNK_BYTES // 4
    assert activations._LARGE_VOCABULARY == vocabulary_loss.LARGE_VOCABULARY


def test_lora_of_7b_fits_18_gb_and_qlora_9_gb_at_2048_tokens() -> None:
    config = get_recipe("qwen25_7b_finetune_lora")()
    config.model.seq_length, totals = 2048, []
    for config.peft.base_quantization in (None, "nf4"):
        estimate = estimate_training_memory(config)
        assert estimate is not None
        totals.append(estimate.total)
    assert totals[0] <= 18e9
    assert totals[1] <= 9e9


@pytest.mark.parametrize("tied", [False, True])
def test_weights_of_a_tensor_parallel_rank_are_those_that_the_plan_gives_it(tied: bool) -> None:
    sizes = {"num_query_groups": 2, "qk_layernorm": True, "add_qkv_bias": True, "vocab_size": 67, "seq_length": 16}
    config = config_of(share_embeddings_and_output_weights=tied, **sizes)
    whole = estimate_training_memory(config)
    config.parallel.tensor_model_parallel_size = 2
    found = estimate_training_memory(config)
    with torch.device("meta"):
        model = Transformer(config.model)
    plan = plan_of(model, TensorRanks(mesh=SimpleNamespace(size=lambda: 2), divides_sequences=False))  # type: ignore[arg-type]
    numels = []
    for name, parameter in model.named_parameters():
        module, _, own = name.rpartition(".")
        shape = list(parameter.shape)
        if (dim := plan[module].dims.get(own)) is not None:
            shape[dim] = -(-shape[dim] // 2)
        numels.append(math.prod(shape))
    assert found is not None
    assert whole is not None
    assert found.trained_weights == found.gradients == 4 * sum(numels)
    assert found.optimizer == 8 * sum(numels)
    assert found.num_parameters == whole.num_parameters
    config.parallel.sequence_parallel = True
    divided = estimate_training_memory(config)
    assert divided is not None
    assert divided.activations < found.activations < whole.activations


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("name", "held", "layers"),
    [("1F1B", (2, 1), None), ("1F1B", (2, 1), [4, 0]), ("GPipe", (4, 4), None), ("ZBVZeroBubble", (4, 4), None)],
)
def test_each_rank_of_a_pipeline_holds_its_stages_and_the_micro_batches_in_flight(
    name: str, held: tuple[int, int], layers: list[int] | None, tied: bool
) -> None:
    """Of stages of two layers, or of the head alone; in a V, of one layer each: the two of a rank hold each."""
    config = config_of(num_layers=4, share_embeddings_and_output_weights=tied)
    config.train.global_batch_size = 8
    parallel = config.parallel
    parallel.pipeline_model_parallel_size, parallel.pipeline_schedule = 2, name
    parallel.pipeline_model_parallel_layout = layers
    estimates = rank_estimates(config, device="cpu")
    sizes = ParallelSizes(pp=2)
    for rank, (estimate, times) in enumerate(zip(estimates, held, strict=True)):
        stages = cut(build_transformer(config.model, seed=0), seats_of_rank(parallel, 4, sizes, rank))
        own = {id(one): one for stage in stages for one in stage.parameters()}.values()
        assert estimate.weights == estimate.gradients == sum(one.nbytes for one in own)
        assert estimate.optimizer == 2 * estimate.weights
        of_passes = [kept_by(stage) for stage in stages]
        expected = times / len(stages) * sum(one["activations"] for one in of_passes)
        assert estimate.activations == pytest.approx(expected, abs=16 * times)  # the losses
        logits = sum(one["logits and loss"] for one in of_passes)
        assert estimate.logits == (3 + (3 if name == "GPipe" else 0)) * logits
    largest = estimate_training_memory(config, device="cpu")
    assert largest is not None
    assert largest.total == max(one.total for one in estimates)


def kept_by(stage: TransformerStage) -> Counter[str]:
    """Bytes that a pass through a stage keeps: what it has received, and what it hands on."""
    meter = LiveMemory(SIZES["vocab_size"])
    meter.assign("weights, trained", [*stage.parameters(), *stage.buffers()])
    tokens = torch.zeros(2, SIZES["seq_length"], dtype=torch.int64)
    meter.assign("data", [tokens])
    received = torch.zeros(2, SIZES["seq_length"], SIZES["hidden_size"], requires_grad=True)
    if not stage.pipeline_seat.is_first:
        meter.assign("activations", [received])
        stage.set_input_tensor(received)
    with meter:
        meter.is_forward = True
        result = stage(tokens, tokens, reduction="sum")
        found = Counter(meter.live)
    assert result.requires_grad
    return found
