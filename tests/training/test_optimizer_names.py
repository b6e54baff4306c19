"""The state of an optimizer in a checkpoint has the names of the parameters, and goes to them whatever their order."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onstep.checkpoint import decode_state, encode_state
from onstep.config import OptimizerConfig
from onstep.errors import CheckpointError
from onstep.optim import TrainingOptimizer, build_optimizer
from onstep.training.checkpointing.optimizer_state import OptimizerState

Make = Callable[[Iterable[nn.Parameter]], Any]

KINDS: dict[str, Make] = {
    "torch": lambda params: torch.optim.AdamW(params, lr=0.1),
    "training": lambda params: TrainingOptimizer(torch.optim.AdamW(params, lr=0.1, fused=True)),
    "momentum": lambda params: TrainingOptimizer(torch.optim.SGD(params, lr=0.1, momentum=0.9)),
}


class Model(nn.Module):
    """Two matrices of one shape, so that a state in the wrong place raises nothing by itself."""

    def __init__(self, order: str = "abc") -> None:
        super().__init__()
        made = {name: nn.Linear(3, 3) for name in "abc"}
        for name in order:
            self.add_module(name, made[name])

    def forward(self, x: Tensor) -> Tensor:
        return sum((layer(x) for layer in self.children()), torch.zeros(()))


def step(model: nn.Module, optimizer: Any, names: str = "") -> None:
    """An update in which each parameter has a gradient of its own, if its name starts with one of `names`."""
    for number, (name, param) in enumerate(sorted(model.named_parameters())):
        if param.requires_grad and (not names or name[0] in names):
            param.grad = torch.full_like(param, number + 1.0)
    getattr(optimizer, "optimizer", optimizer).step()


def saved(optimizer: Any, *chunks: nn.Module) -> Any:
    """The state as a checkpoint has it."""
    return decode_state(*encode_state(copy.deepcopy(OptimizerState(optimizer, chunks).state_dict())))


def moments(model: nn.Module, optimizer: Any) -> dict[str, dict[str, float]]:
    """The first value of each state, by parameter."""
    state = optimizer.state if hasattr(optimizer, "state") else optimizer.optimizer.state
    return {
        name: {key: value.flatten()[0].item() for key, value in state[param].items()}
        for name, param in model.named_parameters()
        if param in state
    }


@pytest.mark.parametrize("kind", KINDS)
def test_state_and_groups_have_names_and_follow_another_order(kind: str) -> None:
    model, other = Model(), Model("cab")
    optimizer = KINDS[kind](model.parameters())
    step(model, optimizer)
    state = saved(optimizer, model)
    assert state["param_groups"][0]["params"] == [name for name, _ in model.named_parameters()] == [*state["state"]]
    assert optimizer.state_dict()["param_groups"][0]["params"] == [*range(6)]  # torch's form for everybody else
    fresh = KINDS[kind](other.parameters())
    OptimizerState(fresh, [other]).load_state_dict(state)
    assert moments(other, fresh) == moments(model, optimizer)


def test_groups_may_be_in_another_order_and_keep_their_settings() -> None:
    def grouped(model: nn.Module, *names: str) -> torch.optim.Optimizer:
        rates = {"weight": 0.1, "bias": 0.5}
        params = {one: [param for name, param in model.named_parameters() if name.endswith(one)] for one in names}
        return torch.optim.AdamW([{"params": params[one], "lr": rates[one]} for one in names])

    model, other = Model(), Model("bca")
    optimizer, fresh = grouped(model, "weight", "bias"), grouped(other, "bias", "weight")
    step(model, optimizer)
    optimizer.param_groups[1]["lr"] = 0.25  # by a schedule
    OptimizerState(fresh, [other]).load_state_dict(saved(optimizer, model))
    assert moments(other, fresh) == moments(model, optimizer)
    assert [group["lr"] for group in fresh.param_groups] == [0.25, 0.1]


@pytest.mark.parametrize("config", [{"optimizer": "muon"}, {"params_dtype": "bfloat16"}], ids=str)
def test_masters_and_two_optimizers_in_one_continue_by_name(config: dict[str, Any]) -> None:
    def built(order: str) -> tuple[nn.Module, Any]:
        layers = nn.Module()
        layers.layers = nn.ModuleList([Model(order)])
        layers.to(torch.bfloat16 if "params_dtype" in config else torch.float32)
        return layers, build_optimizer([layers], OptimizerConfig(lr=0.1, **config))

    (model, optimizer), (other, fresh) = built("abc"), built("cba")
    step(model, optimizer)
    OptimizerState(fresh, [other]).load_state_dict(saved(optimizer, model))
    found = moments(model, optimizer)
    assert found == moments(other, fresh)
    assert all("remainder" in one for one in found.values()) == ("params_dtype" in config)


def test_wrappers_chunks_and_weights_that_are_not_the_models_are_named() -> None:
    model, loss = Model(), nn.Linear(3, 3)
    model.b = torch.compile(model.b)  # type: ignore[assignment]
    model.c.weight = model.a.weight  # tied: one name
    optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.1, momentum=0.9)
    step(model, optimizer)
    step(loss, optimizer)
    names = ["a.weight", "a.bias", "b.weight", "b.bias", "c.bias", "other_weights.0", "other_weights.1"]
    assert [*saved(optimizer, torch.compile(model))["state"]] == names  # type: ignore[arg-type]
    assert {"chunk_0.a.weight", "chunk_1.bias"} < saved(optimizer, model, loss)["state"].keys()
    plain = Model("cab")  # where `c`, the first, gives the tied weight its name
    plain.a.weight = plain.c.weight
    fresh = torch.optim.SGD([*plain.parameters(), *copy.deepcopy(loss).parameters()], lr=0.1, momentum=0.9)
    OptimizerState(fresh, [plain]).load_state_dict(saved(optimizer, model))
    assert moments(plain, fresh)["c.weight"] == moments(model, optimizer)["a.weight"]


def test_a_parameter_without_a_state_has_none_afterwards() -> None:
    model, other = Model(), Model("cba")
    optimizer, fresh = (KINDS["training"](one.parameters()) for one in (model, other))
    step(model, optimizer, "ac")
    OptimizerState(fresh, [other]).load_state_dict(saved(optimizer, model))
    assert moments(other, fresh).keys() == {"a.weight", "a.bias", "c.weight", "c.bias"}


def test_a_state_by_number_loads_as_before() -> None:
    model, other = Model(), Model()
    optimizer, fresh = (KINDS["training"](one.parameters()) for one in (model, other))
    step(model, optimizer)
    OptimizerState(fresh, [other]).load_state_dict(decode_state(*encode_state(optimizer.state_dict())))
    assert moments(other, fresh) == moments(model, optimizer)
    OptimizerState(fresh, [other]).load_state_dict(KINDS["training"](Model().parameters()).state_dict())
    assert moments(other, fresh) == {}


@pytest.mark.parametrize(
    ("frozen", "frozen_now", "message"),
    [
        ("b", "", r"of other parameters: it has none of b\.weight, b\.bias; resume with the same parameters frozen"),
        ("", "b", r"it has that of b\.weight, b\.bias, which are not trained now; .*checkpoint\.load_optim=false"),
        ("a", "b", r"it has none of a\.weight, a\.bias, and it has that of b\.weight, b\.bias, which"),
    ],
)
def test_a_state_of_other_parameters_is_refused(frozen: str, frozen_now: str, message: str) -> None:
    def trained(out: str) -> tuple[nn.Module, Any]:
        model = Model()
        params = [param for name, param in model.named_parameters() if name[0] != out]
        return model, KINDS["training"](params)

    (model, optimizer), (other, fresh) = trained(frozen), trained(frozen_now)
    step(model, optimizer)
    with pytest.raises(CheckpointError, match=message):
        OptimizerState(fresh, [other]).load_state_dict(saved(optimizer, model))
    assert moments(other, fresh) == {}


def test_parameters_that_moved_to_other_groups_are_refused() -> None:
    def grouped(model: nn.Module, size: int) -> torch.optim.Optimizer:
        params = [*model.parameters()]
        return torch.optim.AdamW([{"params": params[:size]}, {"params": params[size:]}], lr=0.1)

    model = Model()
    with pytest.raises(CheckpointError, match=r"groups of \[3, 3\] parameters, .* those of \[2, 4\]; resume with the"):
        OptimizerState(grouped(model, 3), [model]).load_state_dict(saved(grouped(model, 2), model))


def test_parameters_that_the_model_renamed_keep_their_state() -> None:
    model, other = Model(), nn.Module()
    for name in ("a", "renamed", "c"):
        other.add_module(name, nn.Linear(3, 3))
    optimizer, fresh = (KINDS["torch"](one.parameters()) for one in (model, other))
    step(model, optimizer)
    OptimizerState(fresh, [other]).load_state_dict(saved(optimizer, model))
    assert moments(other, fresh)["renamed.bias"] == moments(model, optimizer)["b.bias"]


class Own:
    """An optimizer with Megatron-Core's interface, whose groups have copies and whose state is of its own form."""

    def __init__(self, model: nn.Module, form: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self.optimizer = torch.optim.SGD([nn.Parameter(one.detach().double()) for one in model.parameters()], lr=0.1)
        self.form, self.param_groups, self.loaded = form, self.optimizer.param_groups, {}

    def state_dict(self) -> dict[str, Any]:
        return self.form(self.optimizer.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state


@pytest.mark.parametrize(
    "form",
    [
        lambda state: {"optimizer": state, "masters": [1.0]},
        lambda state: {**state, "param_groups": [{"params": ["w0", "w1"]}]},
        lambda state: {**state, "param_groups": [{"params": [*"uvwxyz"]}]},
    ],
)
def test_a_state_of_another_form_is_saved_and_loaded_as_it_is(form: Any) -> None:
    model = Model()
    own = Own(model, form)
    state = saved(own, model)
    assert state == own.state_dict()
    OptimizerState(own, [model]).load_state_dict(state)
    assert own.loaded == state
