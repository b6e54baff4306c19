"""What the ranks of the tests of models that the user has wrapped or sharded run: `job_*(settings)`."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from onstep import Callback, CallbackManager, Trainer, TrainingArguments, pretrain
from onstep.config import ConfigContainer, DistributedDataParallelConfig
from onstep.data import EvalLoader, TrainLoader
from onstep.distributed import World
from onstep.distributed.buckets import Ranks
from onstep.distributed.buffered import BufferedDataParallel
from onstep.errors import ConfigError, NonFiniteError, ReplicaMismatchError
from onstep.record import read_records
from onstep.training import GlobalState, evaluate, train, train_step
from onstep.training.runs.run_dir import RunDir
from tests.support.small_configs import small_pretrain_config
from tests.support.small_runs import LENGTH, RaggedRows, TinyModel, mean_step, split, sum_step

BATCH, MICRO, STEPS = 24, 2, 6


class Watch(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []

    def on_train_step_end(self, context: Any) -> None:
        self.losses.append(float(next(iter(context.loss_dict.values()))))
        self.norms.append(float(context.grad_norm))


class Returning(TinyModel):
    """As Trainer wants it."""

    def forward(self, tokens: Any, labels: Any, reduction: str = "mean") -> Any:
        return {"loss": super().forward(tokens, labels, reduction)}


def tensor_parallel(model: nn.Module, mesh: Any) -> nn.Module:
    embedding = RowwiseParallel(input_layouts=_replicate())
    return parallelize_module(model, mesh, {"embed": embedding, "out": ColwiseParallel(output_layouts=_replicate())})


def _replicate() -> Any:
    from torch.distributed.tensor import Replicate

    return Replicate()


def average(parameter: torch.Tensor) -> None:
    """What a user's hook does where no wrapper does."""
    assert parameter.grad is not None
    dist.all_reduce(parameter.grad.div_(dist.get_world_size()))


def wrapped(how: str, model: nn.Module) -> nn.Module:
    """The model as a user shards it over the ranks of the process group."""
    size = dist.get_world_size()
    if how == "bare":
        return model
    if how == "averaged":
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(average)
        return model
    if how == "ddp":
        return DistributedDataParallel(model)
    if how == "ddp of one":
        groups = [dist.new_group([rank]) for rank in range(size)]
        dist.barrier()  # the store ends with rank 0, which must not be refused and gone while others connect
        return DistributedDataParallel(model, process_group=groups[dist.get_rank()])
    if how.startswith("ddp of a part"):
        model.out = DistributedDataParallel(model.out)
        if how.endswith("averaged"):
            model.embed.weight.register_post_accumulate_grad_hook(average)
        if how.endswith("frozen"):
            model.embed.weight.requires_grad_(False)
        return model
    if how == "first fsdp":
        return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    if how == "fsdp of a part":
        fully_shard(model.out)
        return model
    if how == "fsdp but for one":
        return fully_shard(model, ignored_params={model.embed.weight})
    if how == "fsdp":
        fully_shard(model.out)
        return fully_shard(model)
    if how.startswith("fsdp summed"):
        fully_shard(model.out)
        fully_shard(model)
        for module in (model, model.out) if how == "fsdp summed" else (model,):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        return model
    if how == "mxfp8" or how.startswith("distopt"):
        ranks = Ranks(init_device_mesh("cpu", (2, size // 2) if how.endswith("2x2") else (size,)))
        both = {"overlap_grad_reduce": True, "overlap_param_gather": True}
        if how == "mxfp8":
            both |= {"fp8_param_gather": True, "reuse_grad_buf_for_mxfp8_param_ag": True}
        ddp = DistributedDataParallelConfig(bucket_cap_mb=0.001, use_distributed_optimizer=True, **both)
        return BufferedDataParallel(model, ranks, ddp)
    if how == "hsdp":
        return fully_shard(model, mesh=init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard")))
    if how == "tp":
        return tensor_parallel(model, init_device_mesh("cpu", (size,)))
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
    if how == "fsdp x tp":
        return fully_shard(tensor_parallel(model, mesh["tp"]), mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])  # pairs of ranks, which do not know each other


def given_config() -> ConfigContainer:
    config = ConfigContainer()
    config.train.micro_batch_size, config.train.global_batch_size, config.train.train_iters = MICRO, BATCH, STEPS
    config.model.seq_length = LENGTH
    config.logger.log_interval, config.validation.eval_iters = 0, None
    return config


def job_doors(settings: dict[str, Any]) -> dict[str, str]:
    """The errors of `train()`, `train_step()` and `evaluate()` for a model that the user has wrapped, by name."""
    dist.init_process_group("gloo")
    model = wrapped(settings["how"], TinyModel())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = GlobalState(given_config(), num_microbatches=1)
    if settings["alone"]:
        state.world = World()
    batches = iter([split(RaggedRows(2), [2]).micro_batches[0]])
    doors: dict[str, Callable[[], object]] = {
        "train": lambda: train(sum_step, [model], optimizer, None, batches, None, state),
        "train_step": lambda: train_step(sum_step, batches, [model], optimizer, None, state),
        "evaluate": lambda: evaluate(state, sum_step, batches, [model], None, None),
    }
    found = {}
    for door, enter in doors.items():
        try:
            enter()
        except ConfigError as error:
            found[door] = str(error)
    return found


def job_train(settings: dict[str, Any]) -> dict[str, Any]:
    """`train()` of a model that the user has wrapped."""
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if ranks > 1:
        dist.init_process_group("gloo")
    config = given_config()
    config.checkpoint.certify, config.checkpoint.save = settings.get("certify", False), settings.get("save")
    model = wrapped(settings["how"], TinyModel()) if ranks > 1 else TinyModel()
    run_dir = RunDir(Path("run")) if config.checkpoint.certify else None
    state = GlobalState(cfg=config, num_microbatches=BATCH // (MICRO * ranks), run_dir=run_dir)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sizes = {"micro_batch_size": MICRO, "global_batch_size": BATCH, "rank": rank, "world_size": ranks}
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("onstep").addHandler(handler)
    watch, manager = Watch(), CallbackManager()
    manager.add(watch)
    loader = TrainLoader(RaggedRows(144), seed=1, **sizes)
    found: dict[str, Any] = {"losses": watch.losses, "norms": watch.norms, "ranks": state.world.size, "error": ""}
    try:
        train(sum_step, [model], optimizer, None, loader, None, state, callback_manager=manager)
    except ReplicaMismatchError as error:
        found["error"] = str(error)
    found["said"] = said
    if run_dir is not None:
        found["chain"] = read_records(run_dir.path / "certificate" / "chain.json")
    return found


def job_refusals(settings: dict[str, Any]) -> dict[str, str | None]:
    """The errors of `train()` with worlds and loaders of other ranks, or without a process group."""
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if settings["has_group"]:
        dist.init_process_group("gloo")
    dealt = {"micro_batch_size": 1, "global_batch_size": 6}

    def error_of(world: World | None, of: tuple[int, int] = (rank, ranks), evaluated: Any = None) -> str | None:
        model: nn.Module = nn.Linear(1, 1)
        if dist.is_initialized():
            model = DistributedDataParallel(model)
        optimizer, config = torch.optim.SGD(model.parameters(), lr=0.1), given_config()
        state = GlobalState(config) if world is None else GlobalState(config, world=world)
        loader = TrainLoader(RaggedRows(12), rank=of[0], world_size=of[1], **dealt)
        try:
            train(sum_step, [model], optimizer, None, loader, evaluated, state)
        except ConfigError as error:
            return str(error)
        return None

    found = {}
    if settings["has_group"]:
        found["rank 0 twice"] = error_of(World(rank=0, size=ranks))
        found["more ranks"] = error_of(World(rank=rank, size=ranks + 1))
        found["all samples"] = error_of(None, of=(0, 1))
        found["samples of rank 0"] = error_of(None, of=(0, ranks))
        found["evaluated by rank 0"] = error_of(None, evaluated=EvalLoader(RaggedRows(2), micro_batch_size=1))
        return found
    found["no group"] = error_of(World(rank=rank, size=2 * ranks))
    if ranks > 1:
        found["no world"] = error_of(None)
    return found


class Spoiled(TinyModel):
    """Whose loss on rank 0 is finite, but not its gradient."""

    def forward(self, *args: Any, **options: Any) -> Any:
        loss = super().forward(*args, **options)
        if dist.get_rank() == 0:
            loss.register_hook(lambda grad: grad * float("nan"))
        return loss


def job_checked(settings: dict[str, Any]) -> str | None:
    """The error of a NaN that the samples of rank 0 cause, in a model that the user has wrapped."""
    dist.init_process_group("gloo")
    config = given_config()
    config.ddp.check_for_nan_in_grad = True
    model = wrapped(settings["how"], Spoiled())
    data = itertools.repeat(split(RaggedRows(2), [2]).micro_batches[0])
    optimizer = torch.optim.SGD(model.parameters())
    try:
        train(sum_step, [model], optimizer, None, data, None, GlobalState(config, num_microbatches=1))
    except NonFiniteError as error:
        return str(error)
    return None


def job_left_alone(settings: dict[str, Any]) -> dict[str, Any]:
    """The errors of `train()` for models in which something exchanges the gradients of a part only."""
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    for how in ("ddp of a part", "fsdp of a part", "fsdp but for one", "fsdp summed in part", "first fsdp"):
        model = wrapped(how, TinyModel())
        data = itertools.repeat(split(RaggedRows(2), [2]).micro_batches[0])
        try:
            train(sum_step, [model], torch.optim.SGD(model.parameters()), None, data, None, GlobalState(given_config()))
        except ConfigError as error:
            found[how] = str(error)
    return found


def job_trainer(settings: dict[str, Any]) -> str | None:
    """`Trainer.train()` or `evaluate()` of a model that the user has sharded; the error."""
    dist.init_process_group("gloo")
    arguments = TrainingArguments(
        output_dir="run", max_steps=2, per_device_train_batch_size=MICRO, use_cpu=True, save_strategy="no"
    )
    model = wrapped(settings["how"], Returning())
    trainer = Trainer(model, arguments, train_dataset=RaggedRows(16), eval_dataset=RaggedRows(8))
    try:
        trainer.train() if settings["door"] == "train" else trainer.evaluate()
    except ConfigError as error:
        return str(error)
    return None


def job_pretrain(settings: dict[str, Any]) -> str | None:
    """`pretrain()` of a model that a hook of the user shards."""
    config = small_pretrain_config(settings["corpus"], settings["cache"])
    config.train.train_iters = 2

    def shard(chunks: list[nn.Module]) -> None:
        if settings["how"] == "fsdp":
            fully_shard(chunks[0])
            return
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
        head = next(name for name, module in chunks[0].named_modules() if isinstance(module, nn.Linear))
        parallelize_module(chunks[0], mesh, {head: ColwiseParallel(output_layouts=_replicate())})

    try:
        pretrain(config, pre_wrap_hooks=[shard])
    except ConfigError as error:
        return str(error)
    return None


def job_early_state(settings: dict[str, Any]) -> str | None:
    """`train()` of a state that was made before the process group."""
    state = GlobalState(cfg=given_config())
    dist.init_process_group("gloo")
    model = DistributedDataParallel(TinyModel())
    data = itertools.repeat(split(RaggedRows(2), [2]).micro_batches[0])
    try:
        train(mean_step, [model], torch.optim.SGD(model.parameters(), lr=0.1), None, data, None, state)
    except ConfigError as error:
        return str(error)
    return None
