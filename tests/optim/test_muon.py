"""Muon for the matrices of the layers, AdamW for the rest: one optimizer to everything around it."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onstep.config import ModelConfig, OptimizerConfig, SchedulerConfig
from onstep.errors import ConfigError
from onstep.models import build_transformer
from onstep.optim import DeviceFiniteGate, MuonWithAdamW, TrainingOptimizer, build_optimizer, build_scheduler
from tests.support.exact_steps import bits, fill_grads

CPU = torch.device("cpu")


def transformer() -> nn.Module:
    sizes = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 16, "seq_length": 8}
    return build_transformer(ModelConfig(**sizes, share_embeddings_and_output_weights=False), seed=0)


def built(model: nn.Module, **options: Any) -> TrainingOptimizer:
    return build_optimizer(
        [model], OptimizerConfig(**{"lr": 0.05, "optimizer": "muon", "weight_decay": 0.1, **options})
    )


def everything(model: nn.Module, optimizer: TrainingOptimizer) -> Any:
    return bits([model.parameters(), optimizer.state_dict()])


def test_layer_matrices_are_muons_and_the_rest_is_adamws() -> None:
    model = transformer()
    model.experts = nn.ParameterDict({"up": torch.ones(2, 4, 8), "gate": torch.ones(1, 8)})
    names = {param: name for name, param in model.named_parameters()}
    optimizer = built(model)
    muon, *others = optimizer.param_groups
    of_muon = [names[param] for param in muon["params"]]
    assert of_muon == [name for name in names.values() if name.startswith("layers.") and "norm" not in name]
    rest = {names[param] for group in others for param in group["params"]}
    assert rest == set(names.values()) - set(of_muon)
    assert {"embedding.weight", "output.weight", "experts.up", "experts.gate", "final_norm.weight"} <= rest
    assert (muon["momentum"], muon["nesterov"], muon["ns_steps"], muon["adjust_lr_fn"]) == (
        0.95,
        True,
        5,
        "match_rms_adamw",
    )
    assert others[0]["betas"] == (0.9, 0.999)
    assert type(optimizer.optimizer) is MuonWithAdamW


def test_the_settings_reach_torchs_muon() -> None:
    options = {"muon_momentum": 0.5, "muon_nesterov": False, "muon_num_ns_steps": 3, "muon_adjust_lr_fn": "original"}
    muon = built(transformer(), **options).param_groups[0]
    assert [muon[key] for key in ("momentum", "nesterov", "ns_steps", "adjust_lr_fn")] == [0.5, False, 3, "original"]


def exact_muon(weight: Tensor, grads: list[Tensor], lr: float, decay: float, momentum: float, nesterov: bool) -> Tensor:
    """Muon's update in float64 from its description; the iteration as a polynomial of the singular values."""
    weight, buffer = weight.double(), torch.zeros_like(weight, dtype=torch.float64)
    for grad in grads:
        grad = grad.double()
        buffer = momentum * buffer + (1 - momentum) * grad
        update = (1 - momentum) * grad + momentum * buffer if nesterov else buffer
        left, values, right = torch.linalg.svd(update, full_matrices=False)
        values = values / update.norm()
        for _ in range(5):
            values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
        weight = weight * (1 - lr * decay) - 0.2 * math.sqrt(max(weight.shape)) * lr * left @ values.diag() @ right
    return weight


@pytest.mark.parametrize(("precision", "share"), [("medium", 0.03), ("highest", 1e-5)])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5)])
def test_steps_are_those_of_a_float64_reference(
    shape: tuple[int, int], nesterov: bool, precision: str, share: float
) -> None:
    """Torch iterates in bfloat16, which has 8 bits: an update differs by about 1 % of its size."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(shape[1], shape[0]))
    start = model[0].weight.detach().clone()
    optimizer = built(model, muon_nesterov=nesterov, clip_grad=None, muon_fp32_matmul_prec=precision)
    grads = []
    for seed in range(3):
        fill_grads(model, seed)
        grads.append(model[0].weight.grad.clone())
        optimizer.prepare()
        assert optimizer.apply()
    expected = exact_muon(start, grads, 0.05, 0.1, 0.95, nesterov)
    moved = (expected - start.double()).norm()
    assert (model[0].weight.detach().double() - expected).norm() < share * moved
    wrong = exact_muon(start, grads, 0.05, 0.1, 0.95, not nesterov)
    assert (model[0].weight.detach().double() - wrong).norm() > 0.05 * moved, "the reference can tell"


def test_it_is_torchs_two_optimizers_bit_for_bit() -> None:
    ours, theirs = transformer(), transformer()
    optimizer = built(ours, clip_grad=None)
    matrices = [p for n, p in theirs.named_parameters() if n.startswith("layers.") and p.ndim == 2]
    others = [p for n, p in theirs.named_parameters() if p.ndim == 2 and not n.startswith("layers.")]
    vectors = [p for p in theirs.parameters() if p.ndim < 2]
    muon = torch.optim.Muon(matrices, lr=0.05, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(
        [{"params": others, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], lr=0.05, fused=True
    )
    for step in range(4):
        fill_grads(ours, step)
        fill_grads(theirs, step)
        optimizer.prepare()
        optimizer.apply()
        muon.step()
        adamw.step()
    assert bits(ours.parameters()) == bits(theirs.parameters())


def test_a_run_continued_from_its_state_is_the_uninterrupted_one() -> None:
    whole, cut = transformer(), transformer()
    optimizers = [built(whole, decoupled_lr=0.01), built(cut, decoupled_lr=0.01)]
    for step in range(6):
        if step == 3:
            saved = copy.deepcopy(optimizers[1].state_dict())
            optimizers[1] = built(cut, decoupled_lr=0.01)
            optimizers[1].load_state_dict(saved)
        for model, optimizer in zip((whole, cut), optimizers, strict=True):
            fill_grads(model, step)
            optimizer.step()
    assert everything(cut, optimizers[1]) == everything(whole, optimizers[0])


@pytest.mark.parametrize(("saved", "wanted"), [("medium", "highest"), ("highest", "medium")])
def test_a_state_that_was_saved_with_the_other_precision_continues_in_the_configured_one(
    saved: str, wanted: str
) -> None:
    models = [transformer() for _ in range(3)]
    optimizers = [
        built(one, muon_fp32_matmul_prec=kind) for one, kind in zip(models, (saved, wanted, wanted), strict=True)
    ]
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    for model, optimizer in zip(models, optimizers, strict=True):
        fill_grads(model, 0)
        optimizer.step()
    with_other, loaded, fresh = map(everything, models, optimizers)
    assert loaded == fresh
    assert loaded != with_other


@pytest.mark.parametrize("gate", [None, DeviceFiniteGate(CPU)], ids=["host", "device"])
def test_what_is_not_finite_changes_nothing(gate: Any) -> None:
    model = transformer()
    inner = built(model).optimizer
    optimizer = TrainingOptimizer(inner, gate=gate)
    for step in range(2):
        fill_grads(model, step)
        optimizer.step()
    before = everything(model, optimizer)
    fill_grads(model, 2)
    model.output.weight.grad[0, 0] = float("nan")  # type: ignore[index, union-attr]
    optimizer.step()
    assert everything(model, optimizer) == before
    assert optimizer.gate.poll(force=True) == 2


def test_gradients_of_both_are_clipped_by_one_norm() -> None:
    model = transformer()
    fill_grads(model, 0)
    plain = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()  # type: ignore[union-attr]
    optimizer = built(model, clip_grad=0.5)
    assert float(optimizer.prepare()) == pytest.approx(float(plain), rel=1e-6)
    clipped = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()  # type: ignore[union-attr]
    assert float(clipped) == pytest.approx(0.5, rel=1e-4)


def test_the_schedule_moves_all_groups_also_after_loading() -> None:
    config = OptimizerConfig(lr=0.05, optimizer="muon", weight_decay=0.1)
    optimizer = built(transformer())
    scheduler = build_scheduler(optimizer, SchedulerConfig(), config, train_iters=10, global_batch_size=1)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    scheduler.step(5)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.025] * 3)
    fill_grads(transformer_of(optimizer), 0)
    before = bits(optimizer.param_groups[0]["params"])
    scheduler.step(5)
    assert scheduler.get_lr({}) == 0
    optimizer.step()
    assert bits(optimizer.param_groups[0]["params"]) == before, "torch's Muon reads the very groups"


def transformer_of(optimizer: TrainingOptimizer) -> nn.ParameterList:
    return nn.ParameterList(param for group in optimizer.param_groups for param in group["params"])


def test_a_group_added_later_is_adamws() -> None:
    model, late = transformer(), nn.Linear(3, 3)
    optimizer = built(model)
    optimizer.add_param_group({"params": list(late.parameters())})
    before = bits(late.parameters())
    fill_grads(model, 0)
    fill_grads(late, 1)
    optimizer.step()
    assert bits(late.parameters()) != before
    assert set(optimizer.state[late.weight]) == {"step", "exp_avg", "exp_avg_sq"}
    assert optimizer.param_groups[-1]["betas"] == (0.9, 0.999)


def test_a_model_without_layer_matrices_is_refused() -> None:
    with pytest.raises(ConfigError, match="muon requires trainable matrices between embedding and output"):
        built(nn.Sequential(nn.Embedding(4, 4), nn.LayerNorm(4)))


def test_a_tiny_language_model_learns() -> None:
    torch.manual_seed(0)
    model = transformer()
    optimizer = built(model, lr=0.01)
    tokens = torch.arange(8).repeat(4, 1)
    losses = []
    for _ in range(80):
        optimizer.zero_grad()
        loss = model(tokens, (tokens + 1) % 16).mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.1 * losses[0]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))], ids=["copy", "pickle"])
def test_a_copy_goes_on_as_the_original(copied: Any) -> None:
    model = transformer()
    optimizer = built(model).optimizer
    fill_grads(model, 0)
    optimizer.step()
    model, optimizer = pair = model, optimizer
    other_model, other = copied(pair)
    for one, its in ((model, optimizer), (other_model, other)):
        fill_grads(one, 1)
        its.step()
    assert bits(other_model.parameters()) == bits(model.parameters())
    assert bits(other.state_dict()) == bits(optimizer.state_dict())
