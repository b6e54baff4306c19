"""The gate by itself; the device gate's logic is run on CPU tensors here and on CUDA in its own file."""

from __future__ import annotations

import pytest
import torch

from onstep.optim import DeviceFiniteGate, FiniteGate, HostFiniteGate, finite_gate

CPU = torch.device("cpu")
BAD = [float("nan"), float("inf")]


@pytest.fixture(params=[HostFiniteGate, lambda: DeviceFiniteGate(CPU)], ids=["host", "device"])
def gate(request: pytest.FixtureRequest) -> FiniteGate:
    opened: FiniteGate = request.param()
    return opened


def observe(gate: FiniteGate, step: int, norm: float) -> None:
    gate.begin_step(step)
    gate.observe_norm(torch.tensor(norm))


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("step", [0, 7, 2**40])
def test_it_names_the_first_bad_step(gate: FiniteGate, bad: float, step: int) -> None:
    observe(gate, step, 1.0)
    assert gate.poll(force=True) is None
    for late in (1, 2, 3):
        observe(gate, step + late, bad)
    assert gate.poll(force=True) == step + 1
    assert gate.first_bad_step == step + 1


def test_it_stays_closed_until_it_is_reset(gate: FiniteGate) -> None:
    observe(gate, 1, float("nan"))
    observe(gate, 2, 1.0)
    assert gate.poll(force=True) == 1
    gate.reset()
    assert gate.first_bad_step is None
    observe(gate, 3, 1.0)
    assert gate.poll(force=True) is None
    observe(gate, 4, float("inf"))
    assert gate.poll(force=True) == 4


def test_observing_leaves_the_values_alone(gate: FiniteGate) -> None:
    norm, loss = torch.tensor(3.25), torch.tensor(1.5, requires_grad=True)
    gate.observe_loss(loss)
    gate.observe_norm(norm)
    assert (float(norm), float(loss.detach())) == (3.25, 1.5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_losses_of_any_precision_count(gate: FiniteGate, dtype: torch.dtype) -> None:
    gate.observe_loss(torch.tensor([1.0], dtype=dtype))
    assert gate.poll(force=True) is None
    gate.observe_loss(torch.tensor([float("nan")], dtype=dtype))
    assert gate.poll(force=True) == 0


def test_the_host_gate_knows_at_once_and_gives_the_value() -> None:
    gate = HostFiniteGate()
    assert gate.observe_norm(torch.tensor(2.5)) == 2.5
    gate.begin_step(1)
    gate.observe_norm(torch.tensor(float("nan")))
    assert gate.first_bad_step == 1


@pytest.mark.parametrize("bad_step", range(1, 12))
def test_the_device_gate_is_at_most_ten_steps_late_without_being_forced(bad_step: int) -> None:
    gate = DeviceFiniteGate(CPU)
    for step in range(1, bad_step + 11):
        observe(gate, step, float("nan") if step == bad_step else 1.0)
        if gate.poll() is not None:
            break
    assert gate.first_bad_step == bad_step


def test_the_device_gate_does_not_copy_at_every_step() -> None:
    gate = DeviceFiniteGate(CPU)
    observe(gate, 1, float("nan"))
    assert gate.poll() is None
    assert float(gate.found_inf) == 1.0


def test_the_device_decides_which_gate() -> None:
    assert isinstance(finite_gate(CPU), HostFiniteGate)
