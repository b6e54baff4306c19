"""The loop's own way into torch's backward engine gives what `loss.backward()` gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from onstep.training.compute.losses import run_backward


def loss_of(weight: Tensor) -> Tensor:
    return (weight * torch.arange(3.0)).square().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_gradients_are_those_of_torch(dtype: torch.dtype) -> None:
    ours, torchs = (nn.Parameter(torch.tensor([1.0, -2.0, 3.5], dtype=dtype)) for _ in range(2))

    for _ in range(2):  # the second adds up
        run_backward(loss_of(ours).to(dtype))
        loss_of(torchs).to(dtype).backward()

    assert ours.grad is not None
    assert torchs.grad is not None
    assert ours.grad.equal(torchs.grad)


def test_a_hook_that_writes_to_its_argument_changes_one_step_only() -> None:
    weight = nn.Parameter(torch.tensor([1.0, -2.0, 3.5]))
    loss = loss_of(weight)
    loss.register_hook(lambda gradient: gradient.mul_(2) and None)  # type: ignore[no-untyped-call]
    run_backward(loss)
    doubled, weight.grad = weight.grad, None

    run_backward(loss_of(weight))

    assert doubled is not None
    assert weight.grad is not None
    assert doubled.equal(2 * weight.grad)


def test_a_loss_that_is_a_parameter_has_a_gradient_of_its_own() -> None:
    weight = nn.Parameter(torch.tensor(2.0))
    run_backward(weight * 1)
    run_backward(weight.view(()))
    assert weight.grad is not None
    weight.grad.mul_(5)

    other = nn.Parameter(torch.tensor(2.0))
    run_backward(other.view(()))

    assert float(weight.grad) == 10.0
    assert other.grad is not None
    assert float(other.grad) == 1.0


class Seen(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


def test_function_modes_other_shapes_and_a_replaced_backward_are_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = nn.Parameter(torch.tensor([1.0, -2.0, 3.5]))
    with Seen() as seen:
        run_backward(loss_of(weight))
    run_backward(loss_of(weight).reshape(1))
    assert "backward" in seen.names

    calls: list[Tensor] = []
    monkeypatch.setattr(Tensor, "backward", lambda self, *args, **options: calls.append(self))
    loss = loss_of(weight)
    run_backward(loss)

    assert calls[0] is loss


def test_a_replaced_autograd_backward_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(torch.autograd, "backward", lambda *args, **options: calls.append(args))

    run_backward(loss_of(nn.Parameter(torch.ones(3))))

    assert len(calls) == 1


def test_a_tensor_subclass_goes_backward_by_its_own_method() -> None:
    calls: list[Tensor] = []

    class Noting(Tensor):
        __torch_function__ = torch._C._disabled_torch_function_impl  # so that nothing else tells it from a tensor

        def backward(self, *args: Any, **options: Any) -> None:
            calls.append(self)

    loss = loss_of(nn.Parameter(torch.ones(3))).as_subclass(Noting)
    run_backward(loss)

    assert calls[0] is loss
