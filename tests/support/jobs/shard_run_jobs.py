"""What the ranks of the tests of runs with checkpoints in shards run: `job_*(settings)`."""

from __future__ import annotations

import json
import os
import signal
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onstep import Callback, CallbackManager, pretrain
from onstep.callbacks import EMA
from onstep.checkpoint import FileStore, Operation, checkpoint_manager
from onstep.checkpoint.format import tensor_parts
from onstep.data import TrainLoader
from onstep.distributed.shards import local_part, updated_shard
from onstep.optim import LowPrecisionOptimizer
from onstep.training import GlobalState, train
from tests.support.jobs.pipeline_jobs import STEPS, config_of, divided, optimizer_of
from tests.support.jobs.shard_jobs import digests_of
from tests.support.jobs.sharding_jobs import BATCH, MICRO, Watch, given_config, wrapped
from tests.support.small_configs import small_pretrain_config
from tests.support.small_runs import RaggedRows, TinyModel, sum_step


class Killing:
    """Kills this rank at one of its file operations.

    Args:
        kind: the operation; `load` for the reading of a tensor.
        name: what the name of its file begins with.
        number: how many such operations are carried out before.
    """

    def __init__(self, kind: str, name: str, number: int) -> None:
        self._kind, self._name, self._left = kind, name, number

    def __call__(self, operation: Operation) -> None:
        self.count(operation.kind, operation.path.name)

    def count(self, kind: str, name: str) -> None:
        if kind == self._kind and name.startswith(self._name):
            self._left -= 1
            if self._left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def install(self) -> None:
        """Kill this rank in whatever it saves or loads from now on."""
        fill = tensor_parts.fill

        def counted(file: Any, path: Path, name: str, tensor: Tensor) -> None:
            self.count("load", path.name)
            fill(file, path, name, tensor)

        tensor_parts.fill = counted
        checkpoint_manager.FileStore = lambda: FileStore(self)  # type: ignore[misc,assignment]

    def watch(self, model: nn.Module) -> None:
        """Kill this rank in a forward or backward pass: each linear layer counts in both."""

        def after_forward(module: nn.Module, args: Any, result: Tensor) -> None:
            self.count("pass", "forward")
            if result.requires_grad:
                result.register_hook(lambda grad: self.count("pass", "backward"))

        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(after_forward)


def counted_reads(part: str) -> list[int]:
    """The number of elements of each tensor, or part of one, that this rank reads of a component from now on."""
    fill, found = tensor_parts.fill, []

    def counted(file: Any, path: Path, name: str, tensor: Tensor) -> None:
        if path.parent.name.startswith(part):
            found.append(tensor.numel())
        fill(file, path, name, tensor)

    tensor_parts.fill = counted
    return found


def job_divided(settings: dict[str, Any]) -> dict[str, Any]:
    """`train()` of our model, divided by keys, from the newest checkpoint if there is one."""
    config = config_of(settings["keys"], settings["steps"])
    config.checkpoint.save, config.checkpoint.save_interval = "checkpoints", 2
    config.checkpoint.async_save = settings.get("async", False)
    chunks, state, loader = divided(config, int(os.environ["WORLD_SIZE"]), seed=settings.get("seed", 0))
    if state.world.rank == settings.get("killed"):
        killing = Killing(*settings["at"])
        killing.install()
        for chunk in chunks:
            killing.watch(chunk)
    optimizer, watch, manager = optimizer_of(chunks), Watch(), CallbackManager()
    manager.add(watch)
    train(STEPS["sum"], chunks, optimizer, None, loader, None, state, callback_manager=manager)
    held = [one for chunk in chunks for one in chunk.parameters()]
    held += [value for one in held for value in optimizer.state[updated_shard(one)].values()]
    digest = sha256(b"".join(local_part(one.detach()).numpy().tobytes() for one in held)).hexdigest()
    return {"losses": watch.losses, "norms": watch.norms, "digests": digest}


def job_run(settings: dict[str, Any]) -> dict[str, Any]:
    """`train()` of a model that the user has wrapped, from the newest checkpoint if there is one."""
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if ranks > 1:
        dist.init_process_group("gloo")
    config = given_config()
    config.train.train_iters = settings["steps"]
    config.checkpoint.save, config.checkpoint.save_interval = "checkpoints", settings.get("save_interval", 2)
    config.checkpoint.async_save = settings.get("async", False)
    config.checkpoint.validate_replication = settings.get("validates", False)
    if rank == settings.get("killed"):
        killing = Killing(*settings["at"])
        killing.install()
    reads = counted_reads("average")
    is_low = settings.get("bfloat16", False)
    model = TinyModel(settings.get("seed", 0), torch.bfloat16 if is_low else torch.float32)
    if rank == settings.get("killed"):
        killing.watch(model)
    if ranks > 1:
        model = wrapped(settings["how"], model)
    state = GlobalState(cfg=config, num_microbatches=BATCH // (MICRO * ranks))
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if is_low:
        optimizer = LowPrecisionOptimizer([optimizer])
    if settings.get("low_moments"):
        low = dict.fromkeys(("exp_avg", "exp_avg_sq"), torch.bfloat16)
        optimizer = LowPrecisionOptimizer([optimizer], averages=low, is_low=False, seed=5)
    watch, manager, average = Watch(), CallbackManager(), EMA(0.9)
    manager.add(watch)
    if settings.get("averages"):
        manager.add(average)
    loader = TrainLoader(
        RaggedRows(144), seed=1, micro_batch_size=MICRO, global_batch_size=BATCH, rank=rank, world_size=ranks
    )
    train(sum_step, [model], optimizer, None, loader, None, state, callback_manager=manager)
    averages = {name.removeprefix("module."): value for name, value in average.averages.items()}
    return {
        "averages": digests_of(averages, "average"),
        "averages_read": sum(reads),
        "losses": watch.losses,
        "norms": watch.norms,
        "digests": digests_of(
            {key.removeprefix("module."): value for key, value in model.state_dict().items()}, "model"
        ),
    }


class Noting(Callback):
    """Writes the sample ids and the loss of each step of this rank, and ends the process, with all others, at a step.

    Args:
        until: this step; None for the end of the run.
    """

    def __init__(self, until: int | None) -> None:
        self.until, self.steps = until, []

    def on_train_step_start(self, context: Any) -> None:
        self.steps.append([context.step + 1, [one for ids in context.sample_ids for one in ids]])

    def on_train_step_end(self, context: Any) -> None:
        self.steps[-1].append(next(iter(context.loss_dict.values())).item())

    def on_step_end(self, context: Any) -> None:
        if context.step == self.until:
            Path(f"result-{os.environ['RANK']}.json").write_text(json.dumps(self.steps))
            dist.barrier()
            os._exit(3)


def job_elastic(settings: dict[str, Any]) -> list[Any]:
    """A part of a run whose checkpoints are of every second step; by rank, its steps with their sample ids and loss."""
    config = small_pretrain_config(settings["corpus"], settings["cache"])
    config.train.train_iters, config.train.global_batch_size, config.train.micro_batch_size = 6, 12, 1
    config.validation.eval_iters, config.checkpoint.save_interval = 0, 2
    config.run.output_dir, config.run.name, config.run.save_weights = str(settings["directory"]), "run", False
    config.parallel.data_parallel_shard_size = settings["shards"]
    noting = Noting(settings["until"])
    pretrain(config, callbacks=[noting])
    return noting.steps
