"""Runs in float16 whose gradients overflow where the test says, with what each step did."""

from __future__ import annotations

import math
import os
from typing import Any

import torch

from onstep import Callback, CallbackManager
from onstep.config.parallel_sizes import ParallelSizes
from onstep.distributed import data_parallel, open_world
from onstep.distributed.fully_sharded import fully_sharded
from onstep.optim import TrainingOptimizer
from onstep.training import GlobalState
from tests.support.small_runs import TinyModel, loader, run, small_state, sum_step


def float16_state(scale: float = 2.0**10, **train_fields: Any) -> GlobalState:
    state = small_state(**train_fields)
    state.cfg.mixed_precision = "fp16_mixed"
    state.cfg.optimizer.initial_loss_scale, state.cfg.optimizer.hysteresis = scale, 1
    return state


class Overflowing:
    """A forward step whose gradient is infinite in the given calls; the loss is not."""

    def __init__(self, *calls: int, step: Any = sum_step, loss_is_nan: bool = False) -> None:
        self.bad_calls, self.step, self.loss_is_nan, self.calls = calls, step, loss_is_nan, 0

    def __call__(self, data_iterator: Any, model: Any) -> Any:
        loss, function = self.step(data_iterator, model)
        self.calls += 1
        if self.calls in self.bad_calls and self.loss_is_nan:
            loss = loss * math.nan
        elif self.calls in self.bad_calls:
            loss.register_hook(lambda gradient: gradient * math.inf)
        return loss, function


class Recorder(Callback):
    """What every step did, as plain numbers."""

    def __init__(self) -> None:
        self.skipped: list[bool] = []
        self.norms: list[float | None] = []
        self.losses: list[float] = []
        self.scales: list[float] = []
        self.rates: list[float] = []
        self.changed: list[bool] = []
        self.logs: list[dict[str, Any]] = []

    def on_train_step_start(self, context: Any) -> None:
        self.before = [p.detach().clone() for p in context.model[0].parameters()]

    def on_train_step_end(self, context: Any) -> None:
        self.skipped.append(context.skipped_iter)
        self.norms.append(None if context.grad_norm is None else float(context.grad_norm))
        self.losses.append(next(iter(context.loss_dict.values())).item())
        self.rates.append(context.optimizer.param_groups[0]["lr"])
        if isinstance(context.optimizer, TrainingOptimizer):
            self.scales.append(context.optimizer.get_loss_scale().item())
        pairs = zip(self.before, context.model[0].parameters(), strict=True)
        self.changed.append(not all(torch.equal(a, b) for a, b in pairs))

    def on_log(self, context: Any) -> None:
        self.logs.append(dict(context.logs))


def recorded(state: GlobalState, **parts: Any) -> Recorder:
    recorder, manager = Recorder(), CallbackManager()
    manager.add(recorder)
    run(state, manager, **parts)
    return recorder


class BadShard(Callback):
    """Makes a gradient infinite in the shards of one rank only, in the second step."""

    def __init__(self, is_here: bool) -> None:
        self.is_here, self.steps = is_here, 0

    def on_train_step_start(self, context: Any) -> None:
        self.steps += 1

    def on_forward_backward_end(self, context: Any) -> None:
        if self.is_here and self.steps == 2:
            next(context.model[0].parameters()).grad.to_local().view(-1)[0] = math.inf


def job_shards(settings: dict[str, Any]) -> dict[str, Any]:
    """Steps of a model in shards, or of one process, perhaps with an overflow in the shards of the last rank."""
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    state = float16_state(train_iters=4)
    state.cfg.dist.device = "cpu"
    state.world = open_world(state.cfg.dist, ParallelSizes(dp_shard=ranks))
    state.num_microbatches = 2 // ranks
    model = TinyModel()
    if ranks > 1:
        fully_sharded([model], state.world, state.cfg, find_blocks=lambda one: [one.out])
    recorder, manager = Recorder(), CallbackManager()
    manager.add(recorder)
    if settings["overflows"]:
        manager.add(BadShard(rank == ranks - 1))
    run(state, manager, model=model, data=loader(16, rank=rank, world_size=ranks))
    state.world.close()
    return {name: getattr(recorder, name) for name in ("skipped", "scales", "norms", "losses")}


def job_overflow(settings: dict[str, Any]) -> dict[str, Any]:
    """Rank 1 overflows in its second step, before gradients are reduced."""
    rank, state = int(os.environ["RANK"]), float16_state(train_iters=4)
    state.cfg.dist.device = "cpu"
    state.world = open_world(state.cfg.dist)
    state.num_microbatches = 1
    [model] = data_parallel([TinyModel()], state.world, state.cfg.ddp)
    step = Overflowing(*([2] if rank == 1 else []))
    recorder = recorded(state, step=step, model=model, data=loader(16, rank=rank, world_size=2))
    result = {"skipped": recorder.skipped, "scales": recorder.scales, "norms": recorder.norms}
    result["weights"] = [p.tolist() for p in model.parameters()]
    state.world.close()
    return result
