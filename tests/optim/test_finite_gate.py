"""The gate by itself; the device gate's logic is run on CPU tensors here and on CUDA in its own file."""

from __future__ import annotations

import pytest
import torch

from onstep.optim import DeviceFiniteGate, FiniteGate, HostFiniteGate, finite_gate
from tests.support.emulated_device import lack_bfloat16_check

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


@pytest.mark.parametrize("bad", [*BAD, -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_one_bad_element_of_a_gradient_of_any_precision_is_seen(
    gate: FiniteGate, dtype: torch.dtype, bad: float
) -> None:
    largest = torch.finfo(dtype).max
    gradients = [torch.full((5,), largest, dtype=dtype), torch.zeros(3, 4, dtype=dtype), torch.zeros(0, dtype=dtype)]
    gate.observe_gradients(gradients)
    assert gate.poll(force=True) is None, "finite, although their norm overflows"
    gradients[1][2, 3] = bad
    gate.begin_step(1)
    gate.observe_gradients(gradients)
    assert gate.poll(force=True) == 1


def test_gradients_of_several_precisions_are_checked_together(gate: FiniteGate) -> None:
    gradients = [torch.ones(2, dtype=dtype) for dtype in (torch.bfloat16, torch.float32, torch.float16)]
    gate.observe_gradients(gradients)
    assert gate.poll(force=True) is None
    gradients[0][1] = float("nan")
    gate.observe_gradients(gradients)
    assert gate.poll(force=True) == 0


def test_the_device_gate_needs_no_kernel_that_cuda_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    lack_bfloat16_check(monkeypatch)
    gate = DeviceFiniteGate(CPU)
    gate.observe_loss(torch.tensor(1.0, dtype=torch.bfloat16, requires_grad=True))
    gate.observe_norm(torch.tensor(1.0, dtype=torch.bfloat16))
    gate.observe_gradients([torch.ones(3, dtype=torch.bfloat16)])
    assert gate.poll(force=True) is None
    gate.observe_loss(torch.tensor(float("nan"), dtype=torch.bfloat16))
    assert gate.poll(force=True) == 0


def test_the_device_gate_only_reads_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    gradients, written = [torch.ones(3), torch.ones(2, 2)], []
    check = torch._amp_foreach_non_finite_check_and_unscale_

    def writing(values: list[torch.Tensor], *args: torch.Tensor) -> None:
        written.extend(value.data_ptr() for value in values)
        check(values, *args)

    monkeypatch.setattr(torch, "_amp_foreach_non_finite_check_and_unscale_", writing)
    DeviceFiniteGate(CPU).observe_gradients(gradients)
    assert written
    assert {one.data_ptr() for one in gradients}.isdisjoint(written)


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


def test_a_read_gives_values_and_what_was_observed(gate: FiniteGate) -> None:
    observe(gate, 3, 1.0)
    values = torch.tensor([0.1], dtype=torch.float64), torch.tensor(2.0, dtype=torch.bfloat16, requires_grad=True)
    assert gate.read(*values) == [0.1, 2.0]
    assert gate.poll() is None
    observe(gate, 4, float("nan"))
    assert gate.read() == []
    assert gate.poll() == 4


@pytest.mark.parametrize("bad_step", range(1, 13))
def test_reads_between_do_not_delay_the_host(bad_step: int) -> None:
    gate = DeviceFiniteGate(CPU)
    for step in range(1, bad_step + 11):
        observe(gate, step, float("nan") if step == bad_step else 1.0)
        if gate.poll() is not None:
            break
        if step in (2, 6):
            gate.read()
    assert gate.first_bad_step == bad_step


def test_a_norm_that_the_host_has_read_is_not_observed_again(gate: FiniteGate) -> None:
    gate.read()
    assert gate.observe_norm(torch.tensor(float("nan")), value=2.5) == 2.5
    assert gate.poll(force=True) is None
    gate.observe_norm(torch.tensor(float("nan")), value=float("nan"))
    assert gate.poll(force=True) == 0
