"""The documented signatures of a forward step, and precision."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Optional

import pytest
import torch

from onstep import CallbackManager, pretrain
from onstep.config import ConfigContainer
from onstep.optim import TrainingOptimizer
from onstep.training import (
    GlobalState,
    forward_step,
    maybe_inject_state,
    needs_global_state_injection,
    train_step,
)
from tests.support.small_runs import RaggedRows, TinyModel, small_state, split


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


def with_text_annotation(data_iterator: Any, model: Any, run: GlobalState) -> Any:
    raise AssertionError("only inspected: annotations are text in this module")


def with_optional_state(run: Any, data_iterator: Any, model: Any) -> Any:
    assert isinstance(run, GlobalState)
    return forward_step(data_iterator, model)


def with_typing_optional(run: Any, data_iterator: Any, model: Any) -> Any:
    assert isinstance(run, GlobalState)
    return forward_step(data_iterator, model)


def with_another_union(data_iterator: Any, model: Any) -> Any:
    return forward_step(data_iterator, model)


# annotations are text in this module, and types in one without the future import
with_optional_state.__annotations__["run"] = GlobalState | None
with_typing_optional.__annotations__["run"] = Optional[GlobalState]  # noqa: UP045 - the older spelling is the point
with_another_union.__annotations__["model"] = torch.nn.Module | None


class Owner:
    def bound(self, state: Any, data_iterator: Any, model: Any) -> Any:
        assert isinstance(state, GlobalState)
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
        (Owner().bound, True),
        (with_optional_state, True),
        (with_typing_optional, True),
        (with_another_union, False),
        (partial(with_state), True),
        (partial(with_plan, return_schedule_plan=False), False),
        (lambda data_iterator, model: forward_step(data_iterator, model), False),
    ],
)
def test_every_documented_signature_trains_the_same(tiny_config: ConfigContainer, step: Any, wants_state: bool) -> None:
    assert bool(needs_global_state_injection(step)) is wants_state
    assert losses_of(tiny_config, step) == losses_of(tiny_config, forward_step)
    if isinstance(step, Functor):
        assert step.calls == 8 + 3 * 2, "8 steps and 3 evaluations of 2 batches"


def test_the_annotation_counts_wherever_it_stands_and_the_first_name_only() -> None:
    assert isinstance(with_text_annotation.__annotations__["run"], str)
    assert needs_global_state_injection(with_text_annotation)
    assert not needs_global_state_injection(lambda data_iterator, model, state=None: None)
    assert not needs_global_state_injection(lambda: None)


def test_the_state_is_bound_first_and_only_where_it_is_wanted() -> None:
    state: Any = object()
    assert maybe_inject_state(plain, state) is plain
    assert maybe_inject_state(lambda *words: words, state, needs_injection=True)(1, 2) == (state, 1, 2)


@pytest.mark.parametrize("reads", [0, 2])
def test_a_forward_step_that_reads_more_or_less_does_not_shift_the_others(reads: int) -> None:
    handed: list[Any] = []

    def step(data_iterator: Any, model: Any) -> Any:
        if reads == 0 and not handed:
            handed.append(None)
            batch = batches.micro_batches[0]
        else:
            batch = next(data_iterator)
            handed.append(batch)
            if reads == 2 and len(handed) == 1:
                next(data_iterator)
        return model(**batch), lambda loss: (loss, batch["labels"].ne(-100).sum(), {})

    batches, model = split(RaggedRows(), [4, 4, 4]), TinyModel()
    optimizer = TrainingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    train_step(step, batches, [model], optimizer, None, small_state())
    assert handed[1:] == batches.micro_batches[1:]


def test_reading_beyond_the_step_is_the_end_of_the_iterator() -> None:
    def step(data_iterator: Any, model: Any) -> Any:
        assert len(list(data_iterator)) == 1
        raise RuntimeError("seen")

    model = TinyModel()
    with pytest.raises(RuntimeError, match="seen"):
        train_step(step, split(RaggedRows(), [12]), [model], torch.optim.SGD(model.parameters()), None, small_state())


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
    assert all(math.isfinite(loss) for loss in rounded)
    assert dtypes == {torch.float32}
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=1e-2)


def test_the_split_into_micro_batches_does_not_change_the_losses(tiny_config: ConfigContainer) -> None:
    whole = losses_of(tiny_config, forward_step)
    for micro in (1, 2):
        tiny_config.train.micro_batch_size = micro
        tiny_config.validation.eval_micro_batch_size = 2
        # float32 gradients summed in another order, over all the steps
        assert losses_of(tiny_config, forward_step) == pytest.approx(whole, rel=1e-5)


def test_two_runs_of_one_configuration_are_the_same_and_leave_it_alone(tiny_config: ConfigContainer) -> None:
    before = tiny_config.to_dict()
    tiny_config.model.hidden_dropout = before["model"]["hidden_dropout"] = 0.1
    assert losses_of(tiny_config, forward_step) == losses_of(tiny_config, forward_step)
    assert tiny_config.to_dict() == before
