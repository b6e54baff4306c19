"""What a run keeps of its steps: numbers, never the graphs or the tensors that they were computed from."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onstep import CallbackManager
from onstep.optim import FiniteGate, HostFiniteGate, TrainingOptimizer
from onstep.optim.finite_gate import DeviceFiniteGate
from tests.support.small_runs import TinyModel, run, small_state


class Saved:
    """What autograd keeps for a backward pass, counted while it is alive."""

    def __init__(self) -> None:
        self.alive: weakref.WeakSet[Any] = weakref.WeakSet()

    def pack(self, tensor: Tensor) -> Any:
        holder = _Holder(tensor.detach())  # an output with its graph would keep itself alive
        self.alive.add(holder)
        return holder


class _Holder:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def reporting_step(data_iterator: Any, model: nn.Module) -> Any:
    """Reports numbers that still have their graphs, in every form."""
    batch = next(data_iterator)
    probabilities = model.out(model.embed(batch["tokens"])).softmax(-1)  # type: ignore[operator,union-attr]
    loss = model(**batch)
    report = {"sharpness": probabilities.square().sum(-1).mean(), "pair": (probabilities.amax(-1).sum(), 24.0)}
    return loss, lambda loss: (loss, batch["labels"].ne(-100).sum(), report)


@pytest.mark.parametrize("gate_of", [HostFiniteGate, lambda: DeviceFiniteGate(torch.device("cpu"))])
def test_no_graph_outlives_its_step(gate_of: Callable[[], FiniteGate]) -> None:
    saved, counts, manager, model = Saved(), list[int](), CallbackManager(), TinyModel()
    manager.register("on_step_end", lambda context: counts.append(len(saved.alive)))
    optimizer = TrainingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), gate=gate_of())
    state = small_state(train_iters=20)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda holder: holder.tensor):
        run(state, manager, step=reporting_step, model=model, optimizer=optimizer)
    assert counts == [0] * 20


def test_no_report_keeps_a_larger_tensor_alive() -> None:
    storages: list[weakref.ref[Any]] = []

    def step(data_iterator: Any, model: nn.Module) -> Any:
        loss, large = model(**next(data_iterator)), torch.ones(1000)
        storages.append(weakref.ref(large.untyped_storage()))
        return loss, lambda loss: (loss, {"first": large[0]})

    run(small_state(train_iters=3), step=step)
    assert [one() for one in storages] == [None] * 6
