"""The documented signatures of a forward step, and precision."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from onstep import CallbackManager, pretrain
from onstep.config import ConfigContainer
from onstep.training import GlobalState, forward_step, needs_global_state_injection


def plain(data_iterator: Any, model: Any) -> Any:
    return forward_step(data_iterator, model)


def with_plan(data_iterator: Any, model: Any, return_schedule_plan: bool = False) -> Any:
    return forward_step(data_iterator, model)


def with_state(state: Any, data_iterator: Any, model: Any) -> Any:
    assert isinstance(state, GlobalState)
    return forward_step(data_iterator, model)


def with_annotated_state(run: GlobalState, data_iterator: Any, model: Any, return_schedule_plan: bool = False) -> Any:
    assert isinstance(run, GlobalState)
    return forward_step(data_iterator, model)


class Functor:
    """Keeps count of its own calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, global_state: Any, data_iterator: Any, model: Any) -> Any:
        assert isinstance(global_state, GlobalState)
        self.calls += 1
        return forward_step(data_iterator, model)


def losses_of(config: ConfigContainer, step: Any) -> list[float]:
    manager, losses = CallbackManager(), []
    manager.register("on_train_step_end", lambda context: losses.append(context.loss_dict["lm loss"].item()))
    pretrain(config, step, callbacks=manager)
    return losses


@pytest.mark.parametrize(
    ("step", "wants_state"),
    [
        (plain, False),
        (with_plan, False),
        (with_state, True),
        (with_annotated_state, True),
        (Functor(), True),
        (partial(with_plan, return_schedule_plan=False), False),
        (lambda data_iterator, model: forward_step(data_iterator, model), False),
    ],
)
def test_every_documented_signature_trains_the_same(tiny_config: ConfigContainer, step: Any, wants_state: bool) -> None:
    assert bool(needs_global_state_injection(step)) is wants_state
    assert losses_of(tiny_config, step) == losses_of(tiny_config, forward_step)
    if isinstance(step, Functor):
        assert step.calls == 8 + 3 * 2, "8 steps and 3 evaluations of 2 batches"


def test_bfloat16_is_autocast_over_float32_weights(tiny_config: ConfigContainer) -> None:
    tiny_config.validation.eval_iters = 0
    exact = losses_of(tiny_config, forward_step)
    dtypes: set[torch.dtype] = set()

    def watching(data_iterator: Any, model: Any) -> Any:
        dtypes.update(parameter.dtype for parameter in model.parameters())
        dtypes.update(parameter.grad.dtype for parameter in model.parameters() if parameter.grad is not None)
        return forward_step(data_iterator, model)

    tiny_config.mixed_precision = "bf16_mixed"
    rounded = losses_of(tiny_config, watching)
    assert dtypes == {torch.float32}
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=1e-2)


def test_the_split_into_micro_batches_does_not_change_the_losses(tiny_config: ConfigContainer) -> None:
    whole = losses_of(tiny_config, forward_step)
    for micro in (1, 2):
        tiny_config.train.micro_batch_size = micro
        tiny_config.validation.eval_micro_batch_size = 2
        assert losses_of(tiny_config, forward_step) == pytest.approx(whole, rel=1e-6)


def test_two_runs_of_one_configuration_are_the_same_and_leave_it_alone(tiny_config: ConfigContainer) -> None:
    before = tiny_config.to_dict()
    tiny_config.model.hidden_dropout = before["model"]["hidden_dropout"] = 0.1
    assert losses_of(tiny_config, forward_step) == losses_of(tiny_config, forward_step)
    assert tiny_config.to_dict() == before
