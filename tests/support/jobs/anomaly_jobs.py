"""What each rank of the anomaly tests runs: every scenario one after the other."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from onstep import Callback, CallbackManager
from onstep.config import ConfigContainer, DistributedInitConfig
from onstep.data import TrainLoader
from onstep.distributed import World, data_parallel, open_world
from onstep.distributed.buffered import buffered_data_parallel
from onstep.errors import OnstepError
from onstep.optim import DeviceFiniteGate, TrainingOptimizer
from onstep.optim.distributed_optimizer import DistributedOptimizer
from onstep.training import GlobalState, train

RANK = int(os.environ["RANK"])
NUM_SAMPLES = 24
BAD_SAMPLE = 14
"""In file order, 4 samples a row and 2 rows a step: step 2, rank 1, micro-batch 1, together with sample 15."""


class Rows(torch.utils.data.Dataset[Any]):
    """Sample i says whether its loss or its gradient is to be spoiled."""

    def __init__(self, spoiled: str, size: int = NUM_SAMPLES) -> None:
        self.spoiled, self.size = spoiled, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        is_bad = index == BAD_SAMPLE
        factor = {"loss": math.nan, "spike": 1e4}.get(self.spoiled, 1.0) if is_bad else 1.0
        spoils = torch.tensor(is_bad and self.spoiled == "gradient")
        return {"x": torch.randn(4, generator=generator), "factor": torch.tensor(factor), "spoils_gradient": spoils}


def step(data_iterator: Any, model: nn.Module) -> Any:
    batch = next(data_iterator)
    loss = ((model(batch["x"]) - 1) ** 2).sum() * batch["factor"].prod()
    if batch["spoils_gradient"].any():
        loss.register_hook(lambda gradient: gradient * math.nan)
    return loss, lambda value: (value, len(batch["x"]), {})


class Recorder(Callback):
    def __init__(self) -> None:
        self.hashes: list[str] = []
        self.sample_ids: list[list[int]] = []
        self.records: list[dict[str, Any]] = []

    def on_step_end(self, context: Any) -> None:
        self.hashes.append(digest(context.model[0]))

    def on_train_step_end(self, context: Any) -> None:
        self.sample_ids.append([one for ids in context.sample_ids or [] for one in ids])

    def on_log(self, context: Any) -> None:
        if "anomaly" in context.logs:
            self.records.append({key: repr(value) for key, value in context.logs.items()})


def digest(model: nn.Module) -> str:
    return hashlib.blake2b(
        b"".join(p.detach().numpy().tobytes() for p in model.parameters()), digest_size=8
    ).hexdigest()


def trained(
    world: World, spoiled: str = "none", ask: Callable[[Any], None] | None = None, event: str = "", **options: Any
) -> dict[str, Any]:
    """One training run; a callback is registered only on the ranks that give `ask`."""
    config = ConfigContainer()
    config.train.micro_batch_size, config.train.global_batch_size = 2, 8
    config.train.train_iters = options.get("train_iters", 7)
    config.logger.log_interval, config.validation.eval_iters = 0, 0
    config.train.on_nonfinite = options.get("on_nonfinite", "raise")
    config.anomaly.on_spike, config.anomaly.spike_warmup = options.get("on_spike", "ignore"), 1
    config.anomaly.spike_metrics = ["loss"]
    state = GlobalState(config, world=world, num_microbatches=2)
    state.control.rank = world.rank
    torch.manual_seed(0)
    divides, make = options.get("divides", False), data_parallel
    if divides:
        make, config.ddp.use_distributed_optimizer, config.ddp.bucket_cap_mb = buffered_data_parallel, True, 1e-4
        config.ddp.overlap_grad_reduce = config.ddp.overlap_param_gather = True
    model = make([nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))], world, config.ddp)
    recorder, manager = Recorder(), CallbackManager()
    manager.add(recorder)
    if ask is not None:
        manager.register(event, ask)
    data: Any = TrainLoader(
        Rows(spoiled), micro_batch_size=2, global_batch_size=8, rank=world.rank, world_size=world.size, shuffle=False
    )
    gate = None
    if options.get("learns_late"):  # the gate of an accelerator, and data that ends before the host learns of the step
        gate = DeviceFiniteGate(torch.device("cpu"))
        data = iter([batch for _ in range(3) for batch in data.read(2).micro_batches])
    result: dict[str, Any] = {"start": digest(model[0])}
    try:
        adamw = torch.optim.AdamW(model[0].parameters(), lr=1e-2, fused=True)
        optimizer = DistributedOptimizer(adamw, model, gate=gate) if divides else TrainingOptimizer(adamw, gate=gate)
        train(step, model, optimizer, None, data, None, state, callback_manager=manager)
    except OnstepError as error:
        result["error"] = f"{type(error).__name__}: {error}"
    progress = state.train_state
    return result | {
        "step": progress.step,
        "end": digest(model[0]),
        "hashes": recorder.hashes,
        "sample_ids": recorder.sample_ids,
        "records": recorder.records,
        "skip_list": progress.skip_list,
        "num_skips": progress.num_skips,
        "overrides": progress.overrides,
        "ended_by_anomaly": state.ending.by_anomaly,
        "was_stopped": state.ending.was_stopped,
        "stopped_by": None if state.ending.stopped_by is None else state.ending.stopped_by.author,
    }


def at_step(number: int, ask: Callable[[Any], None], before: bool = False) -> Callable[[Any], None]:
    def handler(context: Any) -> None:
        if context.state.train_state.step + int(before) == number:
            ask(context.control)

    return handler


def scenarios(world: World, divides: bool) -> dict[str, Any]:
    def scenario(*args: Any, **options: Any) -> dict[str, Any]:
        return trained(*args, divides=divides, **options)

    def on_rank_1(ask: Callable[[Any], None]) -> Callable[[Any], None] | None:
        return ask if RANK == 1 else None

    results = {
        "skip_loss": scenario(world, "loss", on_nonfinite="skip"),
        "skip_gradient": scenario(world, "gradient", on_nonfinite="skip"),
        "raise_gradient": scenario(world, "gradient"),
        "skip_spike": scenario(world, "spike", on_spike="skip"),
        "stop": scenario(world, "loss", on_nonfinite="stop"),
        "stop_late": scenario(world, "loss", on_nonfinite="stop", learns_late=True),
        "asked_skip": scenario(
            world,
            ask=on_rank_1(at_step(4, lambda control: control.skip("rank 1 says so"), before=True)),
            event="on_substep_end",
        ),
        "asked_rollback": scenario(
            world, ask=on_rank_1(at_step(3, lambda control: control.rollback("going wrong"))), event="on_step_end"
        ),
        "asked_set": scenario(
            world, ask=at_step(2, lambda control: control.set("lr_factor", 0.5 + RANK)), event="on_step_end"
        ),
    }
    return {name: {**result, "rank": RANK} for name, result in results.items()}


def job_scenarios(settings: dict[str, Any]) -> dict[str, Any]:
    world = open_world(DistributedInitConfig(device="cpu"))
    try:
        return scenarios(world, settings["divides"])
    finally:
        world.close()


class Overflow(Callback):
    """Makes a weight of rank 1 infinite after step 3."""

    def on_step_end(self, context: Any) -> None:
        if context.step == 3 and RANK == 1:
            next(context.model[0].parameters()).data[0] = math.inf
            context.control.stop("overflown")


def job_overflow(settings: dict[str, Any]) -> str:
    """The error of a training that ends with an infinite weight on one rank."""
    config = ConfigContainer()
    config.train.micro_batch_size, config.train.global_batch_size, config.train.train_iters = 2, 8, 6
    config.logger.log_interval, config.validation.eval_iters = 0, None
    world = open_world(DistributedInitConfig(device="cpu"))
    try:
        model = data_parallel([nn.Linear(4, 4)], world, config.ddp)
        optimizer = torch.optim.SGD(model[0].parameters(), lr=0.01)
        data = TrainLoader(Rows(""), micro_batch_size=2, global_batch_size=8, rank=world.rank, world_size=world.size)
        state = GlobalState(cfg=config, world=world)
        manager = CallbackManager()
        manager.add(Overflow())
        train(step, model, optimizer, None, data, None, state, callback_manager=manager)
    except OnstepError as error:
        return str(error)
    finally:
        world.close()
    return ""
