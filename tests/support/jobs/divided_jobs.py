"""What the ranks of the tests of the distributed optimizer run: `job_*(settings)`."""

from __future__ import annotations

from contextlib import closing
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

from onstep import CallbackManager, Trainer, TrainingArguments
from onstep.config import ConfigContainer, DistributedDataParallelConfig, DistributedInitConfig, apply_overrides
from onstep.distributed import World, open_world, world_size_from_environment
from onstep.distributed.buckets import Bucket
from onstep.distributed.buffered import BufferedDataParallel, buffered_data_parallel
from onstep.errors import ConfigError
from onstep.metrics.norms.parameter_norms import full_norms, local_gradient_norms
from onstep.optim import build_optimizer
from onstep.optim.distributed_optimizer import DistributedOptimizer
from onstep.training import GlobalState, train
from onstep.training.setup.placement import place
from tests.support.jobs.sharding_jobs import Returning, Watch
from tests.support.small_runs import LENGTH, VOCABULARY, RaggedRows, TinyModel, split, sum_step

ROWS = 12


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 5), nn.LayerNorm(5), nn.Linear(5, 1))


def _batch(step: int) -> tuple[Tensor, Tensor]:
    return torch.randn(2, ROWS, 4, generator=torch.Generator().manual_seed(step)).split([1, 1])  # type: ignore[return-value]


def _loss(model: nn.Module, inputs: Tensor) -> Tensor:
    return (model(inputs) - inputs[:, :1]).square().sum()


def job_steps(settings: dict[str, Any]) -> dict[str, Any]:
    """Norms, weights and elements of state of three clipped steps, each of two backward passes."""
    world = open_world(DistributedInitConfig(device="cpu"))
    ddp = DistributedDataParallelConfig(bucket_cap_mb=settings["bucket"] / 2**18, **settings["ddp"])
    if world.size == 1:
        model: nn.Module = _model()
        plain = torch.optim.AdamW(model.parameters(), lr=0.1)
    else:
        [model] = buffered_data_parallel([_model()], world, ddp)
        optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1), [model])
    norms = []
    for step in range(3):
        for whole in _batch(step):
            _loss(model, whole[0].chunk(world.size)[world.rank]).backward()
        if world.size == 1:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
            plain.step()
            plain.zero_grad()
        else:
            _, norm, _ = optimizer.step()
            assert norm is not None
            norms.append(norm.item())
            optimizer.zero_grad()
    state = plain.state if world.size == 1 else optimizer.state
    parts = [getattr(one, "_local_tensor", one) for kept in state.values() for one in kept.values() if one.ndim]
    world.close()
    return {
        "norms": norms,
        "weights": [one.flatten().tolist() for one in model.parameters()],
        "state": sum(one.numel() for one in parts),
    }


class _Block(nn.Module):
    """Uses weights of a module that it does not call (torch's attention), one twice, and one of another module."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        mixed, _ = self.attention(inputs, inputs, inputs)
        hidden = self.down(torch.tanh(self.up(inputs + mixed)))
        return self.down(torch.tanh(hidden @ self.up.weight.T))  # type: ignore[no-any-return]


def _poisoned(start: Any) -> Any:
    """A gather that has NaN in the rows of other ranks before."""

    def started(bucket: Any) -> None:
        for one in () if bucket.is_current else bucket.members:
            kept = one.shard._local_tensor.clone()
            one.parameter.data.fill_(float("nan"))
            one.shard._local_tensor.copy_(kept)
        start(bucket)

    return started


def job_overlaps(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Losses of steps without overlap and with each, gathers being poisoned; the last one evaluates in between."""
    world = open_world(DistributedInitConfig(device="cpu"))
    Bucket.start_gather = _poisoned(Bucket.start_gather)  # type: ignore[method-assign]
    found = []
    for sums, gathers, evaluates in (
        (False, False, False),
        (True, False, False),
        (True, True, False),
        (True, True, True),
    ):
        ddp = DistributedDataParallelConfig(
            bucket_cap_mb=settings["megabytes"], overlap_grad_reduce=sums, overlap_param_gather=gathers
        )
        torch.manual_seed(0)
        [model] = buffered_data_parallel([nn.Sequential(_Block(), _Block())], world, ddp)
        assert isinstance(model, BufferedDataParallel)
        optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1), [model])
        losses, begun = [], 0
        for step in range(4):
            inputs = torch.randn(4, 3, 4, generator=torch.Generator().manual_seed(10 * step + world.rank))
            loss = model(inputs).square().sum()
            loss.backward()
            begun += model._next
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            if step == 0 and gathers:
                model.enable_forward_pre_hook()
            if evaluates and step:
                model.disable_forward_pre_hook()
                losses.append(sum(one.detach().sum().item() for one in model.parameters()))
                model.enable_forward_pre_hook()
        model.finish_param_sync()
        weights = [one.detach().flatten().tolist() for one in model.parameters()]
        order = model.gathers._order
        shared = [one for bucket in model.buckets if len(bucket.members) > 1 for one in bucket.members]
        found.append(
            {
                "losses": losses,
                "weights": weights,
                "begun": begun,
                "buckets": len(model.buckets),
                "order": order,
                "largest shared": max((one.parameter.numel() for one in shared), default=0),
            }
        )
    world.close()
    return found


def job_waiting(settings: dict[str, Any]) -> list[int]:
    """The ranks that meet while the first has begun to gather, and the second has not."""
    world = open_world(DistributedInitConfig(device="cpu", distributed_timeout_minutes=1))
    ddp = DistributedDataParallelConfig(bucket_cap_mb=1e-5, overlap_param_gather=True)
    [model] = buffered_data_parallel([_model()], world, ddp)
    assert isinstance(model, BufferedDataParallel)
    model.enable_forward_pre_hook()
    model.start_param_sync()  # agrees on an order
    model.mark_updated()
    if world.rank == 0:
        model.start_param_sync()
    met = [int(one) for [one] in world.gather_numbers([world.rank])]
    if world.rank == 1:
        model.start_param_sync()
    model.finish_param_sync()
    world.close()
    return met


def job_hooks(settings: dict[str, Any]) -> list[str]:
    """What wrong calls say."""
    world = open_world(DistributedInitConfig(device="cpu"))
    ddp = DistributedDataParallelConfig(overlap_grad_reduce=True, overlap_param_gather=True)
    [model] = buffered_data_parallel([_model()], world, ddp)
    assert isinstance(model, BufferedDataParallel)
    said = []

    def noted(call: Any) -> None:
        try:
            call()
        except (RuntimeError, ConfigError) as error:
            said.append(str(error))

    noted(model.disable_forward_pre_hook)
    model.enable_forward_pre_hook()
    said.append(f"{len(model.remove_forward_pre_hook_handles)} hooks")
    noted(model.enable_forward_pre_hook)
    model.disable_forward_pre_hook(param_sync=False)
    model(torch.ones(1, 4)).sum().backward()
    noted(lambda: model(torch.ones(1, 4)).sum().backward())
    model.finish_grad_sync()
    world.close()
    return said


def job_norms(settings: dict[str, Any]) -> dict[str, Any]:
    """The norm of each parameter's gradient, and whether a NaN of the last rank alone changes a weight here."""
    world = open_world(DistributedInitConfig(device="cpu"))
    model: nn.Module = _model()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
    if world.size > 1:
        [model] = buffered_data_parallel([model], world, DistributedDataParallelConfig(overlap_grad_reduce=True))
        optimizer = DistributedOptimizer(optimizer, [model])
    inputs = _batch(0)[0][0]
    _loss(model, inputs.chunk(world.size)[world.rank]).backward()
    if isinstance(model, BufferedDataParallel):
        model.finish_grad_sync()
    norms = full_norms(local_gradient_norms([model]), [model], are_of_gradients=True)
    optimizer.zero_grad()
    before = [one.detach().clone() for one in model.parameters()]
    applied = []
    for is_of_shard in (False, True) if world.size > 1 else ():
        optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1), [model])  # an open gate
        is_bad = world.rank == world.size - 1
        (_loss(model, inputs) * (float("nan") if is_bad and not is_of_shard else 1.0)).backward()
        if is_of_shard:
            model.finish_grad_sync()
            if is_bad:
                next(
                    one for one in model.members if one.shard_gradient.to_local().numel()
                ).shard_gradient.to_local().fill_(float("nan"))
        applied.append(optimizer.step()[0])
        optimizer.zero_grad()
    after = [one.detach() for one in model.parameters()]
    world.close()
    return {
        "norms": [norms[name] for name in sorted(norms)],
        "applied": applied,
        "kept": all(map(torch.equal, before, after)),
    }


def job_twice(settings: dict[str, Any]) -> list[list[float]]:
    """The losses of two calls of `Trainer.train()`, of which the second continues with the optimizer's state."""
    if settings.get("joins"):
        dist.init_process_group("gloo")
    arguments = TrainingArguments(
        output_dir="run",
        max_steps=3,
        per_device_train_batch_size=2,
        learning_rate=0.05,
        use_cpu=True,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        config_overrides={"run.save_weights": False, **settings["keys"]},
    )
    trainer = Trainer(Returning(), arguments, train_dataset=RaggedRows(16), eval_dataset=RaggedRows(8))
    losses = []
    for _ in range(2):
        trainer.train()
        assert trainer.accelerator.unwrap_model(trainer.model_wrapped) is trainer.model
        losses.append([one["loss"] for one in trainer.state.log_history if "loss" in one])
    if settings.get("saves"):
        losses.append([trainer.evaluate()["eval_loss"]])
        trainer.save_model("saved")
        whole = {name: one.detach().full_tensor() for name, one in trainer.model.named_parameters()}
        if trainer.is_world_process_zero():
            torch.testing.assert_close(load_file("saved/model.safetensors"), whole, rtol=0, atol=0)
    return losses


class _Layered(TinyModel):
    """With matrices for Muon."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.out = nn.Linear(8, VOCABULARY)

    def forward(self, tokens: Tensor, labels: Tensor, reduction: str = "sum") -> Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return nn.functional.cross_entropy(self.out(hidden).flatten(0, 1), labels.flatten(), reduction=reduction)


def job_again(settings: dict[str, Any]) -> dict[str, Any]:
    """Losses and norms of two calls of `train()` with one model, in one world, and in a world each.

    The second world has another group before those of its mesh, so that the names of groups are not those of the first.
    Both with one optimizer, and with one each. At last, what a model in shards says to another layout.
    """
    config = ConfigContainer()
    config.train.micro_batch_size = config.train.global_batch_size = 2
    config.train.train_iters, config.model.seq_length = 2, LENGTH
    config.logger.log_interval, config.validation.eval_iters = 0, None
    given = ["optimizer.optimizer=muon", "optimizer.lr=0.01", "dist.device=cpu", "ddp.bucket_cap_mb=0.0001"]
    apply_overrides(config, [*given, *settings["keys"]])
    trained = [_trained_twice(config, *flags) for flags in product([False, True], repeat=2)]
    return {"trained": trained, "refused": _refused(config) if config.parallel.data_parallel_shard_size == 2 else ""}


def _refused(config: ConfigContainer) -> str:
    """The error of a model that is to be divided between other ranks than at first."""
    model = _Layered()
    for replicas in (2, 1):
        config.parallel.data_parallel_replicate_size, config.parallel.data_parallel_shard_size = replicas, 4 // replicas
        with closing(_world(config, apart=False)) as world:
            try:
                place([model], world, config)
            except ConfigError as error:
                return str(error)
    return ""


def _trained_twice(config: ConfigContainer, renews_optimizer: bool, renews_world: bool) -> list[Any]:
    torch.manual_seed(0)
    model, watch, world, optimizer = _Layered(), Watch(), _world(config, apart=False), None
    callbacks = CallbackManager()
    callbacks.add(watch)
    for number in range(2):
        if number == 1 and renews_world:
            world.close()
            world = _world(config, apart=True)
        [chunk] = place([model], world, config)
        if optimizer is None or renews_optimizer:
            optimizer = build_optimizer([chunk], config.optimizer)
        batches = [split(RaggedRows(4), [2, 2]).micro_batches[(world.rank + one) % 2] for one in range(2)]
        state = GlobalState(config, num_microbatches=1, world=world)
        train(sum_step, [chunk], optimizer, None, iter(batches), None, state, callback_manager=callbacks)
    world.close()
    return [watch.losses, watch.norms]


def _world(config: ConfigContainer, *, apart: bool) -> World:
    ranks = world_size_from_environment()
    world = open_world(config.dist, config.parallel_sizes(ranks))
    if apart:
        world.group_beside("dp_shard")
    return world
