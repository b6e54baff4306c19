"""One NaN in a loop of one's own around `train_step()`: the policy decides about that step, not all later ones."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from onstep.errors import NonFiniteError
from onstep.optim import DeviceFiniteGate, TrainingOptimizer
from onstep.training import train_step
from tests.support.small_runs import RaggedRows, TinyModel, small_state, split, sum_step

BAD = 3


def stepped(
    policy: str, gate: str, num_steps: int = 6, errors: list[str] | None = None
) -> list[tuple[int, bool, bool]]:
    """Of each step: whether it was skipped, is to end the training, and has changed a weight.

    Those that raise NonFiniteError are left out where the loop collects the errors.
    """
    state = small_state(on_nonfinite=policy)
    model, calls = TinyModel(), iter(range(1, 2 * num_steps + 1))
    optimizer = TrainingOptimizer(
        torch.optim.AdamW(model.parameters(), lr=0.01, fused=True),
        gate=DeviceFiniteGate(torch.device("cpu")) if gate == "device" else None,
    )

    def step_func(data_iterator: Any, model: Any) -> Any:
        loss, function = sum_step(data_iterator, model)
        return loss * (math.nan if next(calls) == 2 * BAD else 1.0), function

    seen = []
    for _ in range(num_steps):
        before = model.out.weight.detach().clone()
        try:
            result = train_step(step_func, split(RaggedRows(4), [2, 2]), [model], optimizer, None, state)
        except NonFiniteError as error:
            if errors is None:
                raise
            errors.append(str(error))
            continue
        state.train_state.step += 1
        seen.append((result.skipped_iter, result.should_exit, not torch.equal(before, model.out.weight)))
    return seen


@pytest.mark.parametrize("gate", ["host", "device"])
def test_a_bad_update_is_left_out_and_the_next_is_applied(gate: str, caplog: pytest.LogCaptureFixture) -> None:
    for policy in ("skip", "rollback"):
        left_out = [number == BAD for number in range(1, 7)]
        assert stepped(policy, gate) == [(int(is_bad), False, not is_bad) for is_bad in left_out]
        assert f"non-finite loss at step {BAD}" in caplog.records[-1].getMessage()
        assert f"({policy})" in caplog.records[-1].getMessage()


def test_a_stop_is_told_once() -> None:
    assert stepped("stop", "host")[BAD - 2 :] == [(0, False, True), (1, True, False), *[(0, False, True)] * 3]


@pytest.mark.parametrize("gate", ["host", "device"])
def test_by_default_the_bad_step_is_an_error_that_names_the_micro_batch(gate: str) -> None:
    with pytest.raises(NonFiniteError, match=rf"of step {BAD}: rank 0, micro-batch 1: loss nan\. train.on_nonfinite=r"):
        stepped("raise", gate, num_steps=30)


@pytest.mark.parametrize("gate", ["host", "device"])
def test_a_loop_that_handles_the_error_goes_on_with_the_next_update(gate: str) -> None:
    errors: list[str] = []
    seen = stepped("raise", gate, num_steps=30, errors=errors)
    assert len(errors) == 1
    assert f"of step {BAD}" in errors[0]
    assert seen[-1] == (0, False, True)
