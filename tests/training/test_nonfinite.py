"""What is not finite is never applied and never hidden."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from onstep import Callback, pretrain
from onstep.config import ConfigContainer
from onstep.errors import NonFiniteError
from onstep.training import forward_step


class Poisoned:
    """A forward step whose loss, or gradient, is NaN in one micro-batch."""

    def __init__(self, call: int, gradient_only: bool) -> None:
        self.call, self.gradient_only, self.calls = call, gradient_only, 0

    def __call__(self, data_iterator: Any, model: Any) -> Any:
        loss, function = forward_step(data_iterator, model)
        self.calls += 1
        if self.calls == self.call:
            if self.gradient_only:
                loss.register_hook(lambda gradient: gradient * float("nan"))
            else:
                loss = loss * float("nan")
        return loss, function


class Watch(Callback):
    def __init__(self) -> None:
        self.sample_ids: list[list[int]] = []
        self.reason: str | None = None
        self.exceptions = 0
        self.untouched = False

    def on_train_step_start(self, context: Any) -> None:
        self.sample_ids = context.sample_ids
        self.weights = [p.detach().clone() for p in context.model[0].parameters()]
        self.moments = [s["exp_avg"].clone() for s in context.optimizer.state.values()]

    def on_exception(self, context: Any) -> None:
        self.exceptions += 1
        same = zip(self.weights, context.model[0].parameters(), strict=True)
        moments = zip(self.moments, [s["exp_avg"] for s in context.optimizer.state.values()], strict=True)
        self.untouched = all(torch.equal(a, b) for pairs in (same, moments) for a, b in pairs)

    def on_run_end(self, context: Any) -> None:
        self.reason = context.reason


@pytest.mark.parametrize("gradient_only", [False, True])
def test_a_nan_is_named_and_not_applied(tiny_config: ConfigContainer, gradient_only: bool) -> None:
    tiny_config.train.micro_batch_size = 2
    watch = Watch()
    with pytest.raises(NonFiniteError) as raised:
        pretrain(tiny_config, Poisoned(call=2 * 3 + 2, gradient_only=gradient_only), callbacks=[watch])
    message = str(raised.value)
    assert "step 4" in message
    if not gradient_only:
        assert "micro-batch 1" in message
        assert str(watch.sample_ids[1]) in message
        assert str(watch.sample_ids[0]) not in message
    assert watch.untouched
    assert (watch.exceptions, watch.reason) == (1, "failed")
