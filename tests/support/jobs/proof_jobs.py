"""What the ranks of the tests of fingerprints, trajectory hashes and compared replicas run: `job_*(settings)`."""

from __future__ import annotations

import json
import logging
import os
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.functional import cross_entropy, dropout
from torch.nn.parallel import DistributedDataParallel

from onstep import CallbackManager
from onstep.data import TrainLoader
from onstep.distributed import ParallelSizes, World
from onstep.distributed.shards import local_part
from onstep.errors import ReplicaMismatchError
from onstep.record import read_records
from onstep.training import GlobalState, train
from onstep.training.runs.run_dir import RunDir
from onstep.training.verification.fingerprint import fingerprint
from onstep.training.verification.trajectory_hash import HashChain
from onstep.training.verification.weight_hash import check_param_hashes_across_dp_replicas
from tests.support.jobs.sharding_jobs import BATCH, MICRO, Watch, given_config, wrapped
from tests.support.small_runs import VOCABULARY, RaggedRows, TinyModel, sum_step

SHAPES = ((67, 6), (3,), (5, 4, 3), (1, 40000))
"""Not divisible by the ranks, smaller than their number, and longer than what is mixed at a time."""


class Odd(nn.Module):
    """Parameters of several shapes and types, one of them frozen and one used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.all = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in SHAPES])
        self.all[1].requires_grad_(False)
        self.tied = self.all[0]


def hsdp_mesh() -> DeviceMesh:
    shape, names = (2, dist.get_world_size() // 2), ("dp_replicate", "dp_shard")
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def sharded(how: str, model: nn.Module) -> nn.Module:
    """The model as its ranks hold it."""
    if how == "ddp":
        return DistributedDataParallel(model)
    if how == "fsdp":
        return fully_shard(model)
    if how == "fsdp but for one":
        return fully_shard(model, ignored_params={next(model.parameters())})
    if how == "hsdp":
        return fully_shard(model, mesh=hsdp_mesh())
    return model


def with_other_dimensions(model: nn.Module) -> list[Tensor]:
    """The parameters, each cut along its last dimension over all ranks, or along its last two over a mesh."""
    size = dist.get_world_size()
    mesh = hsdp_mesh() if size == 4 else init_device_mesh("cpu", (size,))
    cut = [Shard(-2), Shard(-1)] if size == 4 else [Shard(-1)]
    return [
        distribute_tensor(one.detach(), mesh, [Shard(one.ndim + of.dim) for of in cut]) if one.ndim > 1 else one
        for one in model.parameters()
    ]


def sizes_of(how: str, ranks: int) -> ParallelSizes:
    """The sizes of a layout; not all layouts have a name for what their ranks hold."""
    if how == "hsdp":
        return ParallelSizes(dp_replicate=2, dp_shard=ranks // 2)
    return ParallelSizes(dp_shard=ranks) if how == "fsdp" else ParallelSizes(dp_replicate=ranks)


def world_of_group() -> World:
    if dist.is_initialized():
        return World(rank=dist.get_rank(), size=dist.get_world_size())
    return World()


def job_fingerprint(settings: dict[str, Any]) -> str:
    """The fingerprint of the same weights in a layout, with one bit of the last parameter changed if asked for."""
    if settings["how"] != "one":
        dist.init_process_group("gloo")
    model = Odd()
    if settings.get("changed"):
        model.all[-1].data[0, -1] += 1
    tensors: Iterable[Tensor] = model.parameters()
    tensors = (
        with_other_dimensions(model) if settings["how"] == "dims" else sharded(settings["how"], model).parameters()
    )
    return fingerprint(tensors, world_of_group())


def job_chain(settings: dict[str, Any]) -> list[Any]:
    """The records of two steps; in the second, one rank has changed a weight that other ranks hold, too."""
    dist.init_process_group("gloo")
    world, model = world_of_group(), sharded(settings["how"], Odd())
    optimizer, chain = torch.optim.SGD(model.parameters(), lr=0.5), HashChain(None, world)
    records = [chain.extend(1, [world.rank], optimizer, torch.tensor(2.5), [model])]
    if world.rank == settings["drifts"]:
        local_part(next(model.parameters()).detach())[0] += 1
    return [*records, chain.extend(2, [0], optimizer, torch.tensor(1.5), [model]), chain.state_dict()]


def job_compared(settings: dict[str, Any]) -> list[str | None]:
    """What the comparison of replicas says of equal ones, and after ranks have changed weights that they hold."""
    dist.init_process_group("gloo")
    size, how = dist.get_world_size(), settings["how"]
    world, model = World(rank=dist.get_rank(), size=size, sizes=sizes_of(how, size)), sharded(how, Odd())
    said = [_mismatch(model, world)]
    if world.rank in settings["drifts"]:
        for parameter in list(model.parameters())[:2]:
            local_part(parameter.detach())[:1] += 1
    return [*said, _mismatch(model, world)]


def _mismatch(model: nn.Module, world: World) -> str | None:
    try:
        check_param_hashes_across_dp_replicas([model], world, 7)
    except ReplicaMismatchError as error:
        return str(error)
    return None


class Poisoned(TinyModel):
    """One row of the gradient of the embedding, the last one, is NaN by a sample; the loss is by some calls."""

    def __init__(self, seed: int, sample: int | None, calls: list[int]) -> None:
        super().__init__(seed)
        self._bad = None if sample is None else RaggedRows(144)[sample]["tokens"]
        self._bad_calls, self.num_calls = calls, 0

    def forward(self, tokens: Tensor, labels: Tensor, reduction: str = "sum") -> Tensor:
        self.num_calls += 1
        if self.num_calls in self._bad_calls:
            return super().forward(tokens, labels, reduction) * torch.nan
        is_bad = torch.zeros(len(tokens)) if self._bad is None else (tokens == self._bad).all(-1)
        if not is_bad.any():
            return super().forward(tokens, labels, reduction)
        poison = torch.zeros(*tokens.shape, 8)
        poison[is_bad, 0] = torch.nan
        tokens = tokens.clone()
        tokens[is_bad, 0] = VOCABULARY - 1
        embedded = self.embed(tokens)
        if embedded.requires_grad:
            embedded.register_hook(lambda gradient: gradient + poison)
        return cross_entropy(self.out(embedded).flatten(0, 1), labels.flatten(), reduction=reduction)


class Dropping(Poisoned):
    """With dropout, and a buffer that each forward pass changes and the loss depends on."""

    seen: Tensor

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, tokens: Tensor, labels: Tensor, reduction: str = "sum") -> Tensor:
        self.seen += 1
        self.num_calls += 1
        hidden = dropout(self.embed(tokens), 0.2) * (1 + self.seen / 100)
        return cross_entropy(self.out(hidden).flatten(0, 1), labels.flatten(), reduction=reduction)


class Died(Exception):
    """The process could have died here."""


def job_trained(settings: dict[str, Any]) -> dict[str, Any]:
    """`train()` of a certified run with checkpoints; `dies` ends it after a step, and the next call continues it."""
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if ranks > 1:
        dist.init_process_group("gloo")
    random.seed(rank)
    np.random.seed(rank)
    config = given_config()
    config.train.on_nonfinite = settings.get("on_nonfinite", "raise")
    config.rerun_state_machine.rerun_mode = settings.get("rerun_mode", "disabled")
    config.checkpoint.certify = True
    config.checkpoint.save, config.checkpoint.save_interval = "checkpoints", 2
    config.checkpoint.async_save = settings.get("async", False)
    bad_calls = settings.get("bad_calls", []) if rank == 1 else []
    made = Dropping if settings.get("drops") else Poisoned
    model: nn.Module = made(settings.get("seed", 0), settings.get("bad_sample"), bad_calls)
    inner = model
    torch.manual_seed(rank)
    if ranks > 1:
        model = wrapped(settings["how"], model)
    Path("run").mkdir(exist_ok=True)
    Path("run", "run.json").write_text('{"config": {}}')
    world = World(rank=rank, size=ranks, sizes=sizes_of(settings["how"], ranks))
    state = GlobalState(cfg=config, num_microbatches=BATCH // (MICRO * ranks), run_dir=RunDir(Path("run")), world=world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    watch, manager = Watch(), CallbackManager()
    manager.add(watch)

    def die(context: Any) -> None:
        if context.state.train_state.step == settings.get("dies"):
            raise Died

    manager.register("on_train_step_end", die)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("onstep").addHandler(handler)
    sizes = {"micro_batch_size": MICRO, "global_batch_size": BATCH, "rank": rank, "world_size": ranks}
    loader = TrainLoader(RaggedRows(144), seed=1, **sizes)
    code = None
    try:
        train(sum_step, [model], optimizer, None, loader, None, state, callback_manager=manager)
    except Died:
        pass
    except SystemExit as error:
        code = error.code
    progress, decisions = state.train_state, Path("run", "decisions.jsonl")
    lines = decisions.read_text().splitlines() if rank == 0 and decisions.exists() else []
    places = [json.loads(line).get("place") for line in lines]
    return {
        "exit_code": code,
        "num_calls": inner.num_calls,
        "losses": watch.losses,
        "norms": watch.norms,
        "chain": read_records(Path("run", "certificate", "chain.json")) if rank == 0 else [],
        "skip_list": progress.skip_list,
        "counts": [progress.step, progress.num_skips, progress.num_rollbacks],
        "said": said,
        "places": places,
    }
