"""The loop drives our optimizers, torch's, and objects in Megatron-Core's convention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from onstep import CallbackManager
from onstep.errors import NonFiniteError
from onstep.optim import TrainingOptimizer
from onstep.training import train_step
from tests.support.small_runs import RaggedRows, TinyModel, run, small_state, split, sum_step

CLIP = 0.05


class MegatronStyle:
    """SGD that clips by itself; `step()` gives (successful, gradient norm, zeros), a float norm as Megatron does."""

    def __init__(self, model: nn.Module, skips: tuple[int, ...] = ()) -> None:
        self.param_groups = [{"params": list(model.parameters()), "lr": 0.1}]
        self.skips, self.steps = skips, 0
        self.seen: list[list[torch.Tensor]] = []

    def zero_grad(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None

    def step(self) -> tuple[bool, float | None, int | None]:
        self.steps += 1
        parameters = self.param_groups[0]["params"]
        self.seen.append([p.grad.clone() for p in parameters])
        if self.steps in self.skips:
            return False, None, None
        norm = nn.utils.clip_grad_norm_(parameters, CLIP)
        with torch.no_grad():
            for parameter in parameters:
                parameter.sub_(parameter.grad, alpha=self.param_groups[0]["lr"])
        return True, norm.item(), 7


class CountingScheduler:
    def __init__(self) -> None:
        self.increments: list[int] = []

    def step(self, increment: int) -> None:
        self.increments.append(increment)


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_train_step_returns_megatron_bridges_tuple() -> None:
    model = TinyModel()
    scheduler = CountingScheduler()
    result = train_step(
        sum_step, split(RaggedRows(), [6, 6]), [model], MegatronStyle(model), scheduler, small_state(batch=12, micro=6)
    )
    loss_dict, skipped_iter, should_checkpoint, should_exit, exit_code, grad_norm, num_zeros = result
    assert loss_dict["lm loss"].ndim == 0
    assert (skipped_iter, should_checkpoint, should_exit, exit_code, num_zeros) == (0, False, False, 0, 7)
    assert grad_norm > CLIP, "the norm is that before clipping"
    assert scheduler.increments == [12]


@pytest.mark.parametrize("sizes", [[12], [5, 4, 3]], ids=str)
def test_a_foreign_optimizer_gets_the_gradients_of_the_big_batch(sizes: list[int]) -> None:
    model = TinyModel()
    optimizer = MegatronStyle(model)
    train_step(sum_step, split(RaggedRows(), sizes), [model], optimizer, None, small_state())
    other = TinyModel()
    other(**split(RaggedRows(), [12]).micro_batches[0], reduction="mean").backward()
    for mine, theirs in zip(optimizer.seen[0], other.parameters(), strict=True):
        # float32 sums of micro-batches, against one of all rows
        torch.testing.assert_close(mine, theirs.grad, rtol=1e-4, atol=1e-6)


def test_the_same_run_through_ours_torchs_and_a_foreign_optimizer() -> None:
    def trained(make: Any) -> list[torch.Tensor]:
        model, state = TinyModel(), small_state(train_iters=5)
        state.cfg.optimizer.clip_grad = CLIP
        return weights(run(state, model=model, optimizer=make(model)))

    ours = trained(lambda model: TrainingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), clip_grad=CLIP))
    plain = trained(lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    foreign = trained(MegatronStyle)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
    for a, b in zip(ours, foreign, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_a_torch_scheduler_steps_once_for_each_update() -> None:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.8)
    run(
        small_state(train_iters=3),
        model=model,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5),
    )
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


def test_before_the_update_ours_are_clipped_and_foreign_gradients_are_raw() -> None:
    norms: dict[str, float] = {}

    def observed(name: str, make: Any) -> None:
        manager, model = CallbackManager(), TinyModel()

        def note(context: Any) -> None:
            grads = [p.grad for p in context.model[0].parameters()]
            norms[name] = torch.stack([grad.norm() for grad in grads]).norm().item()

        manager.register("on_pre_optimizer_step", note)
        state = small_state(train_iters=1)
        state.cfg.optimizer.clip_grad = CLIP
        run(state, manager, model=model, optimizer=make(model))

    observed("ours", lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    observed("foreign", MegatronStyle)
    assert norms["ours"] == pytest.approx(CLIP, rel=1e-3)
    assert norms["foreign"] > 2 * CLIP


def test_a_skipped_update_counts_as_a_step_and_does_not_move_the_scheduler() -> None:
    manager, model, skipped = CallbackManager(), TinyModel(), []
    manager.register("on_train_step_end", lambda context: skipped.append(context.skipped_iter))
    scheduler, state = CountingScheduler(), small_state(train_iters=4)
    run(state, manager, model=model, optimizer=MegatronStyle(model, skips=(2, 3)), scheduler=scheduler)
    assert skipped == [False, True, True, False]
    assert scheduler.increments == [4, 4]
    assert (state.train_state.step, state.train_state.consumed_train_samples) == (4, 16)


def test_the_float_norm_of_a_foreign_optimizer_is_logged() -> None:
    state, model = small_state(train_iters=2), TinyModel()
    state.cfg.logger.log_interval = 2
    optimizer = MegatronStyle(model)
    run(state, model=model, optimizer=optimizer)
    raw = [torch.stack([grad.norm() for grad in grads]).norm().item() for grads in optimizer.seen]
    assert state.info.log_history[0]["max_grad_norm"] == pytest.approx(max(raw), rel=1e-5)


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_what_is_not_finite_never_reaches_a_foreign_optimizer(where: str) -> None:
    model, calls = TinyModel(), []
    optimizer = MegatronStyle(model)

    def step(data_iterator: Any, model: nn.Module) -> Any:
        loss, function = sum_step(data_iterator, model)
        calls.append(1)
        if len(calls) == 4:
            if where == "gradient":
                loss.register_hook(lambda gradient: gradient * float("nan"))
            else:
                loss = loss * float("inf")
        return loss, function

    state = small_state(train_iters=5)
    with pytest.raises(NonFiniteError, match="step 2"):
        run(state, step=step, model=model, optimizer=optimizer)
    assert optimizer.steps == 1
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert state.train_state.step == 1


def test_training_again_after_a_nan_starts_with_an_open_gate() -> None:
    model = TinyModel()
    optimizer = TrainingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    def poisoned(data_iterator: Any, model: nn.Module) -> Any:
        loss, function = sum_step(data_iterator, model)
        return loss * float("nan"), function

    with pytest.raises(NonFiniteError):
        run(small_state(train_iters=2), step=poisoned, model=model, optimizer=optimizer)
    before, state = weights(model), small_state(train_iters=2)
    run(state, model=model, optimizer=optimizer)
    assert state.train_state.step == 2
    assert not torch.equal(before[0], model.embed.weight)
