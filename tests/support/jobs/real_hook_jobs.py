"""What the ranks run that train with real forward pre-hooks, whose gathers are late: `job_*(settings)`.

While a gather is in flight, the rows of other ranks are NaN: who reads them is seen.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from onstep import Callback, CallbackManager
from onstep.checkpoint.states import ModelState
from onstep.config import DistributedDataParallelConfig
from onstep.data import EvalLoader, TrainLoader
from onstep.distributed.buckets import Bucket, Ranks
from onstep.distributed.buffered import BufferedDataParallel
from onstep.errors import CheckpointError
from onstep.optim import OptimizerParamScheduler
from onstep.optim.distributed_optimizer import DistributedOptimizer
from onstep.training import (
    GlobalState,
    disable_forward_pre_hook,
    enable_forward_pre_hook,
    evaluate,
    maybe_check_weight_hash_across_dp_replicas,
    save_checkpoint_and_time,
    should_disable_forward_pre_hook,
    train_step,
)
from tests.support.every_moment import digest
from tests.support.jobs.sharding_jobs import BATCH, MICRO, given_config
from tests.support.small_runs import RaggedRows, TinyModel, run, split, sum_step

STEPS = 6


@contextmanager
def late_gathers() -> Iterator[None]:
    """Gathers leave NaN in the rows of other ranks until somebody waits for them, however fast they are."""
    start, finish = Bucket.start_gather, Bucket.finish_gather
    held: dict[Bucket, list[Tensor]] = {}

    def started(bucket: Bucket) -> None:
        if bucket.is_current:
            return
        start(bucket)
        finish(bucket)
        held[bucket] = [one.parameter.detach().clone() for one in bucket.members]
        for one in bucket.members:
            own = one.shard.to_local().detach().clone()
            one.parameter.data.fill_(float("nan"))
            one.shard.to_local().data.copy_(own)

    def finished(bucket: Bucket) -> None:
        for one, value in zip(bucket.members, held.pop(bucket, []), strict=False):
            one.parameter.data.copy_(value)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Bucket, "start_gather", started)
        patched.setattr(Bucket, "finish_gather", finished)
        yield


def parts(overlap: bool = True, model: nn.Module | None = None) -> tuple[BufferedDataParallel, GlobalState]:
    """A real chunk whose parameters are in several buckets, and the state of its run."""
    ranks = int(os.environ["WORLD_SIZE"])
    flags = dict.fromkeys(("overlap_grad_reduce", "overlap_param_gather"), overlap)
    config = DistributedDataParallelConfig(bucket_cap_mb=0.0004, use_distributed_optimizer=True, **flags)
    chunk = BufferedDataParallel(model or TinyModel(), Ranks(init_device_mesh("cpu", (ranks,))), config)
    given = given_config()
    given.ddp, given.train.train_iters = config, STEPS
    return chunk, GlobalState(cfg=given, num_microbatches=BATCH // (MICRO * ranks))


def loaders() -> tuple[TrainLoader, EvalLoader]:
    of_rank: dict[str, Any] = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
    train = TrainLoader(RaggedRows(144), seed=1, micro_batch_size=MICRO, global_batch_size=BATCH, **of_rank)
    return train, EvalLoader(RaggedRows(6), micro_batch_size=MICRO, **of_rank)


class Careless(Callback):
    """Uses and replaces weights right after each update, though it says that it reads none, as nobody should."""

    reads_weights = False
    ranks = "all"

    def __init__(self, chunk: BufferedDataParallel, found: dict[str, list[Any]]) -> None:
        self._inner, self._found = chunk.module, found
        self._first = {name: one.clone() for name, one in chunk.module.state_dict().items()}
        self._batch = split(RaggedRows(2), [2]).micro_batches[0]

    def on_step_end(self, context: Any) -> None:
        if context.step == 4:  # without a look at those that it has
            self._inner.load_state_dict(self._first)
            self._found["replaced"].append(self._loss())
            return
        self._found["inference"].append(self._loss())
        if context.step % 2 and int(os.environ["RANK"]) == 0:
            self._found["export"].append(digest(self._inner.state_dict()))
            return
        kept = {name: one.clone() for name, one in self._inner.state_dict().items()}
        self._inner.load_state_dict(self._first)
        self._found["reference"].append(self._loss())
        self._inner.load_state_dict(kept)

    def _loss(self) -> float:
        with torch.no_grad():
            return float(self._inner(**self._batch))

    def on_eval_end(self, context: Any) -> None:
        self._found["evaluation"].append(float(context.metrics["eval_loss"]))


def job_careless(settings: dict[str, Any]) -> list[dict[str, list[Any]]]:
    """What is read of the weights in and after a run: without overlaps, and with both while gathers are late."""
    dist.init_process_group("gloo")
    return [_careless(Path(str(overlap)), overlap=overlap) for overlap in (False, True)]


def _careless(directory: Path, *, overlap: bool) -> dict[str, list[Any]]:
    chunk, state = parts(overlap)
    state.cfg.validation.eval_interval = 1
    state.cfg.checkpoint.save, state.cfg.checkpoint.save_interval = str(directory), 1
    state.cfg.checkpoint.async_save = overlap
    found: dict[str, list[Any]] = {
        kind: [] for kind in ("evaluation", "save", "export", "inference", "reference", "replaced")
    }
    manager, (data, valid) = CallbackManager(), loaders()
    manager.add(Careless(chunk, found))
    optimizer = torch.optim.AdamW(chunk.parameters(), lr=1e-2)
    with late_gathers():
        run(state, manager, step=sum_step, data=data, valid=valid, model=chunk, optimizer=optimizer)
    found["replaced"].append(digest(chunk.module.state_dict()))
    dist.barrier()
    found["save"] = [digest(one) for one in saved_in(directory)]
    return found


def saved_in(directory: Path) -> list[dict[str, Tensor]]:
    """The weights of all checkpoints, in the order of their steps."""
    files = {int(one.parent.parent.name.rpartition("-")[2]): one for one in directory.glob("*/model/*.safetensors")}
    return [load_file(files[step]) for step in sorted(files)]


def loaded_misfit(chunk: BufferedDataParallel) -> bool:
    """Whether weights of which the last does not fit are refused as a whole."""
    before = digest(chunk.module.state_dict())
    given = {name: torch.zeros_like(value) for name, value in chunk.module.state_dict().items()}
    last = list(given)[-1]
    try:
        ModelState([chunk]).load_state_dict({**given, last: torch.zeros(77)})
    except CheckpointError as error:
        return last in str(error) and digest(chunk.module.state_dict()) == before
    return False


def job_bridge(settings: dict[str, Any]) -> dict[str, Any]:
    """What the functions of Bridge's loop do with real chunks, called as in a loop of one's own."""
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    chunk, state = parts()
    state.cfg.train.on_nonfinite = "skip"
    state.cfg.checkpoint.save = "checkpoints"
    config = chunk.ddp_config
    found["toggles"] = should_disable_forward_pre_hook(
        config.use_megatron_fsdp, config.use_distributed_optimizer, config.overlap_param_gather
    )
    optimizer = DistributedOptimizer(torch.optim.AdamW(chunk.parameters(), lr=1e-2), [chunk])
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=1e-2,
        min_lr=0.0,
        lr_warmup_steps=0,
        lr_decay_steps=1000,
        lr_decay_style="linear",
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    data, _ = loaders()
    batches = iter(lambda: data.read(state.num_microbatches).micro_batches, None)
    micros = (one for micro_batches in batches for one in micro_batches)

    def step(forward: Callable[..., Any] = sum_step) -> tuple[Any, ...]:
        result = train_step(forward, micros, [chunk], optimizer, scheduler, state)
        state.train_state.step += 1
        return result[1], scheduler.num_steps

    def is_late() -> bool:
        return any(bool(one.detach().isnan().any()) for one in chunk.parameters())

    def spoiled(data_iterator: Any, model: Any) -> Any:
        loss, function = sum_step(data_iterator, model)
        return loss * (float("nan") if dist.get_rank() == 1 else 1.0), function

    with late_gathers():
        found["the first update"] = [*step(), is_late()]
        enable_forward_pre_hook([chunk])
        found["hooks"] = len(chunk.remove_forward_pre_hook_handles)
        step()
        found["late after an update with hooks"] = is_late()
        disable_forward_pre_hook([chunk], param_sync=False)
        found["late after hooks are off without a gather"] = is_late()
        enable_forward_pre_hook([chunk])
        disable_forward_pre_hook([chunk], optimizer=optimizer)
        found["late after hooks are off"] = is_late()
        enable_forward_pre_hook([chunk])
        step()
        maybe_check_weight_hash_across_dp_replicas([chunk], optimizer, 1, 3, True)
        found["compared"] = [is_late(), len(chunk.remove_forward_pre_hook_handles)]
        step()
        evaluate(state, sum_step, iter(split(RaggedRows(2), [2]).micro_batches), [chunk], None, None)
        step()
        save_checkpoint_and_time(state, [chunk], optimizer, scheduler, 0.0)
        [weights] = saved_in(Path("checkpoints"))
        found["saved while hooks are on"] = any(bool(one.isnan().any()) for one in weights.values())
        found["copied"] = digest(deepcopy(chunk.module).state_dict()) == digest(chunk.module.state_dict())
        found["a misfit"] = loaded_misfit(chunk)
        found["hooks after a save"] = len(chunk.remove_forward_pre_hook_handles)
        chunk.disable_forward_pre_hook()
        before = digest(dict(chunk.module.named_parameters()))
        found["saved"] = digest(weights) == before
        found["a failed update"] = [*step(spoiled), digest(dict(chunk.module.named_parameters())) == before]
    return found


def job_chunks(settings: dict[str, Any]) -> list[Any]:
    """The modules with hooks of two chunks, one of which has frozen parameters, once they are on and once off."""
    dist.init_process_group("gloo")
    model = TinyModel()
    model.embed.requires_grad_(False)
    chunks = [parts()[0], parts(model=model)[0]]
    found = []
    for toggle in (enable_forward_pre_hook, disable_forward_pre_hook):
        toggle(chunks)
        found.append(
            [
                [name for name, module in one.module.named_modules() if module in one.remove_forward_pre_hook_handles]
                for one in chunks
            ]
        )
    return found
