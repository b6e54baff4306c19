"""What the ranks of the tests of runs that change their layout run: `job_*(settings)`."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onstep import Callback, CallbackManager
from onstep.callbacks import EMA
from onstep.checkpoint import CheckpointManager, ModelState, SaveRequest, StateComponent, resolve
from onstep.data import TrainLoader
from onstep.distributed.buffered import buffered_chunks
from onstep.distributed.pipeline.seats import is_staged
from onstep.optim import TrainingOptimizer
from onstep.optim.distributed_optimizer import DistributedOptimizer
from onstep.training import GlobalState, train
from onstep.training.checkpointing.optimizer_state import OptimizerState
from onstep.training.checkpointing.over_stages import ModelOverStages, OptimizerOverStages
from onstep.training.checkpointing.saved_states import pattern_of
from tests.support.jobs.pipeline_jobs import STEPS, Curve, config_of, divided
from tests.support.jobs.pipeline_jobs import optimizer_of as grouped
from tests.support.jobs.shard_jobs import digests_of
from tests.support.jobs.sharding_jobs import BATCH, MICRO, Watch, given_config, wrapped
from tests.support.small_runs import RaggedRows, TinyModel, sum_step


class Numbered(RaggedRows):
    """Rows that say which they are."""

    def __init__(self, size: int, seen: list[int]) -> None:
        super().__init__(size)
        self.seen = seen

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.seen.append(index)
        return super().__getitem__(index)


class Look(Callback):
    """Notes the states of model and optimizer before the first step, and when they are saved after `at` steps.

    Collective.
    """

    ranks = "all"

    def __init__(self, weights: ModelState, state: OptimizerState, at: int) -> None:
        self.weights, self.state, self.at = weights, state, at
        self.first: dict[str, Any] = {}
        self.later: dict[str, Any] = {}

    def on_train_start(self, context: Any) -> None:
        self.first = self.now()

    def on_checkpoint_save_start(self, context: Any) -> None:
        if context.checkpoint_step == self.at:
            self.later = self.now()

    def now(self) -> dict[str, Any]:
        state = self.state.state_dict()
        rates = [(group["lr"], group["weight_decay"], group["params"]) for group in state["param_groups"]]
        steps = {name: one["step"].item() for name, one in state["state"].items()}
        digests = digests_of(self.weights.state_dict(), "model") | digests_of(state["state"], "state")
        return {"digests": digests, "groups": rates, "steps": steps}


def optimizer_of(model: nn.Module, reverses: bool) -> TrainingOptimizer:
    """AdamW with a group of matrices and one of vectors, in either order."""
    params = [*model.parameters()]
    groups: list[dict[str, Any]] = [
        {"params": [one for one in params if one.ndim > 1], "weight_decay": 0.1},
        {"params": [one for one in params if one.ndim < 2], "weight_decay": 0.0, "lr": 3e-3},
    ]
    made = torch.optim.AdamW(groups[::-1] if reverses else groups, lr=1e-2)
    return DistributedOptimizer(made, [model]) if buffered_chunks([model]) else TrainingOptimizer(made)


def in_steps(seen: list[int]) -> list[int]:
    """The samples that the ranks have read, one step after the other. Collective."""
    of_ranks = [seen]
    if dist.is_initialized():
        of_ranks = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(of_ranks, seen)
    size = BATCH // len(of_ranks)
    steps = range(0, len(seen), size)
    return [index for at in steps for of_one in of_ranks for index in of_one[at : at + size]]


def job_legs(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs of our model, each divided by its keys, from the checkpoint in its directory if there is one."""
    return [_leg(one, int(os.environ.get("WORLD_SIZE", "1"))) for one in settings["runs"]]


def job_continued(settings: dict[str, Any]) -> dict[str, Any]:
    """Runs that save after each step, synchronously or not, and from each of their checkpoints two steps more, one in
    the middle all; by whether they save asynchronously, and by the step after which they are continued.
    """
    ranks, steps = int(os.environ.get("WORLD_SIZE", "1")), settings["steps"]
    found: dict[str, Any] = {}
    keys = [*settings["keys"], "checkpoint.save_interval=1", "checkpoint.most_recent_k=-1", "checkpoint.certify=true"]
    for is_async in (False, True):
        common = {"keys": keys, "steps": steps, "async": is_async, "averages": True, "decays": True}
        whole = Path(str(is_async))
        found[whole.name] = _leg({**common, "directory": str(whole), "leg": None, "seed": 0}, ranks)
        for step in range(1, steps):
            part = Path(f"{is_async} {step}")
            if os.environ.get("RANK", "0") == "0":  # others wait for it in the meeting of the ranks
                shutil.copytree(whole / f"checkpoint-{step}", part / f"checkpoint-{step}")
            end = steps if step == steps // 2 else min(step + 2, steps)
            found[part.name] = _leg({**common, "directory": str(part), "leg": end, "seed": step}, ranks)
    return found


def _leg(one: dict[str, Any], ranks: int) -> dict[str, Any]:
    micro = [] if one.get("averages") else ["train.micro_batch_size=1"]
    config = config_of([*micro, *one["keys"]], one["steps"])
    config.checkpoint.save, config.checkpoint.async_save = one["directory"], one["async"]
    config.train.exit_interval = one["leg"]
    chunks, state, loader = divided(config, ranks, seed=one["seed"])
    optimizer = grouped(chunks)
    torch.manual_seed(one["seed"])  # of the masks of dropout, where no checkpoint says otherwise
    curve, manager = Curve(), CallbackManager()
    manager.add(curve)
    if one.get("averages"):
        manager.add(EMA(0.5, apply_at_end=False))
    rates = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8) if one.get("decays") else None
    with suppress(SystemExit):
        train(STEPS["sum"], chunks, optimizer, rates, loader, None, state, callback_manager=manager)
    state.world.close()
    return {"losses": curve.losses, "norms": curve.norms}


def job_copies(settings: dict[str, Any]) -> None:
    """Load model and optimizer on a layout, from one directory, and save them in another."""
    config = config_of(["train.micro_batch_size=1", *settings["keys"]], 1)
    chunks, state, _ = divided(config, int(os.environ.get("WORLD_SIZE", "1")), seed=2)
    optimizer = TrainingOptimizer(grouped(chunks))
    weights: Any = ModelState(chunks)
    of_optimizer: Any = OptimizerState(optimizer, chunks)
    if is_staged(chunks):
        weights = ModelOverStages(chunks, state.world)
        of_optimizer = OptimizerOverStages(optimizer, chunks, state.world)
    parts = [
        StateComponent(key, one, pattern_of(weights)) for key, one in (("model", weights), ("optimizer", of_optimizer))
    ]
    saved = resolve(settings["source"])
    CheckpointManager(Path(settings["source"]), state.world).load(
        saved, parts, skip=set(saved.manifest.components) - {"model", "optimizer"}
    )
    CheckpointManager(Path(settings["target"]), state.world).save(SaveRequest(saved.step, parts, {}))
    state.world.close()


def job_runs(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs of `train()`, each on a layout, from the checkpoint in its directory if there is one."""
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if ranks > 1:
        dist.init_process_group("gloo")
    found = []
    for one in settings["runs"]:
        config = given_config()
        config.train.train_iters = one["steps"]
        config.checkpoint.save, config.checkpoint.save_interval = one["directory"], one["save_interval"]
        config.checkpoint.async_save = one.get("async", ranks > 2)
        model = wrapped(one["how"], TinyModel(seed=one["seed"])) if ranks > 1 else TinyModel(seed=one["seed"])
        optimizer = optimizer_of(model, reverses=one["reverses"])
        watch, look = Watch(), Look(ModelState([model]), OptimizerState(optimizer, [model]), one["save_interval"])
        manager, seen = CallbackManager(), []
        manager.add([watch, look])
        loader = TrainLoader(
            Numbered(240, seen), seed=1, micro_batch_size=MICRO, global_batch_size=BATCH, rank=rank, world_size=ranks
        )
        state = GlobalState(cfg=config, num_microbatches=BATCH // (MICRO * ranks))
        train(sum_step, [model], optimizer, None, loader, None, state, callback_manager=manager)
        found.append(
            {
                "losses": watch.losses,
                "norms": watch.norms,
                "first": look.first,
                "later": look.later,
                "seen": in_steps(seen),
                "end": digests_of(
                    {name.removeprefix("module."): value for name, value in model.state_dict().items()}, ""
                )
                | look.now()["digests"],
            }
        )
    return found
