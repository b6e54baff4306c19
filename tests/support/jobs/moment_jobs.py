"""What the ranks of the tests of overlapped gathers run: `job_*(settings)`."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh

from onstep import CallbackManager, Trainer, TrainerCallback, pretrain
from onstep.config import DistributedDataParallelConfig, apply_overrides
from onstep.data import EvalLoader, TrainLoader
from onstep.distributed.buckets import Ranks
from onstep.distributed.buffered import BufferedDataParallel
from onstep.events import VALID_EVENTS
from onstep.optim.distributed_optimizer import DistributedOptimizer
from onstep.training import GlobalState, forward_step
from tests.support.every_moment import digest, readings
from tests.support.jobs.sharding_jobs import BATCH, MICRO, given_config
from tests.support.small_configs import small_pretrain_config
from tests.support.small_models import Regression, arguments, regression_rows
from tests.support.small_runs import RaggedRows, TinyModel


def job_readings(settings: dict[str, Any]) -> list[list[list[Any]]]:
    """What this rank reads at every moment of a run: without overlaps, and with both."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    found = []
    for overlap in (False, True):
        flags = dict.fromkeys(("overlap_grad_reduce", "overlap_param_gather"), overlap)
        if settings.get("mxfp8"):
            flags |= {"fp8_param_gather": True, "reuse_grad_buf_for_mxfp8_param_ag": overlap}
        mesh = init_device_mesh("cpu", tuple(settings.get("mesh", [ranks])))
        config = DistributedDataParallelConfig(bucket_cap_mb=0.0004, use_distributed_optimizer=True, **flags)
        chunk = BufferedDataParallel(TinyModel(), Ranks(mesh), config)
        assert len(chunk.buckets) > 1
        given = given_config()
        given.ddp = config
        state = GlobalState(cfg=given, num_microbatches=BATCH // (MICRO * ranks))
        of_rank: dict[str, Any] = {"rank": rank, "world_size": ranks}
        data = TrainLoader(RaggedRows(144), seed=1, micro_batch_size=MICRO, global_batch_size=BATCH, **of_rank)
        valid = EvalLoader(RaggedRows(6), micro_batch_size=MICRO, **of_rank)
        optimizer = torch.optim.AdamW(chunk.parameters(), lr=1e-2)
        directory, options = Path(f"overlap-{overlap}"), settings.get("options", {})
        seen = readings(chunk, optimizer, state, directory, pytest.MonkeyPatch(), data=data, valid=valid, **options)
        found.append([list(one) for one in seen])
        dist.barrier()
    return found


def job_bridge_run(settings: dict[str, Any]) -> dict[str, Any]:
    """The events of `pretrain` with both overlaps, and what was called of the chunk."""
    config = small_pretrain_config(Path(settings["corpus"]), Path(settings["cache"]), layers=2, width=32)
    config.train.train_iters, config.train.global_batch_size, config.train.micro_batch_size = 8, 4, 1
    config.validation.eval_interval, config.validation.eval_iters, config.logger.log_interval = 5, 2, 4
    config.checkpoint.save, config.checkpoint.save_interval = "checkpoints", 7
    config.checkpoint.async_save, config.run.save_weights = settings["async"], False
    apply_overrides(config, [f"ddp.{key}=true" for key in [*_FLAGS, *settings.get("keys", [])]])
    calls: list[str] = []
    on, off = BufferedDataParallel.enable_forward_pre_hook, BufferedDataParallel.disable_forward_pre_hook

    def enable(chunk: BufferedDataParallel) -> None:
        calls.append("on")
        on(chunk)

    def disable(chunk: BufferedDataParallel, param_sync: bool = True) -> None:
        calls.append("off, gathered" if param_sync else "off")
        off(chunk, param_sync)

    states: list[tuple[str, bool]] = []
    chunks: list[BufferedDataParallel] = []
    manager = CallbackManager()

    def note(context: Any) -> None:
        if not chunks:
            chunks.extend(one for one in context.model or () if isinstance(one, BufferedDataParallel))
        states.append((context.event, bool(chunks and chunks[0].remove_forward_pre_hook_handles)))

    for event in sorted(VALID_EVENTS):
        manager.register(event, note)
    forward = forward_step
    if settings.get("skips_first"):
        config.train.on_nonfinite, forward = "skip", _spoiled_once()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(BufferedDataParallel, "enable_forward_pre_hook", enable)
        patched.setattr(BufferedDataParallel, "disable_forward_pre_hook", disable)
        for owner, name in _STAGED if settings.get("keys") else ():
            patched.setattr(owner, name, _noted(getattr(owner, name), name.strip("_").partition("_")[0], calls))
        if fails_at := settings.get("fails_at"):
            event, step = fails_at
            manager.register(event, lambda context: _fail(context, step))
        try:
            pretrain(config, forward, callbacks=manager)
        except ArithmeticError:
            calls.append("failed")
    return {"events": [event for event, _ in states], "states": states, "calls": calls}


def _spoiled_once() -> Callable[..., Any]:
    """A forward step whose first loss on rank 1 is not a number."""
    numbers = itertools.count()

    def spoiled(data_iterator: Any, model: Any) -> Any:
        loss, function = forward_step(data_iterator, model)
        is_bad = next(numbers) == 0 and os.environ["RANK"] == "1"
        return loss * (float("nan") if is_bad else 1.0), function

    return spoiled


_STAGED: list[tuple[Any, str]] = [
    (BufferedDataParallel, "zero_grad_buffer"),
    (DistributedOptimizer, "_copy_main_params_to_param_buffer"),
    (DistributedOptimizer, "prepare_model_params_for_param_sync"),
    (BufferedDataParallel, "mark_updated"),
    (BufferedDataParallel, "finish_grad_sync"),
]


def _noted(method: Any, name: str, calls: list[str]) -> Any:
    def noted(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return method(*args, **kwargs)

    return noted


def _fail(context: Any, step: int) -> None:
    if context.state.train_state.step == step:
        raise ArithmeticError


_FLAGS = ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather")


class Exports(TrainerCallback):
    """Writes the model after every step, and says that it reads no weights, as nobody should."""

    reads_weights = False
    ranks = "all"

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        directory = Path(args.output_dir) / f"export-{state.global_step}"
        if state.global_step % 2:
            kwargs["trainer"].save_model(str(directory))
        elif state.is_world_process_zero:  # as scripts for Hugging Face's Trainer do
            directory.mkdir(parents=True)
            save_file(kwargs["trainer"].model.state_dict(), directory / "model.safetensors")


def job_exports(settings: dict[str, Any]) -> list[list[str]]:
    """Digests of what a trained model is exported as after each step: without overlaps, and with both."""
    found = []
    for overlap in ("false", "true"):
        overrides = {f"ddp.{key}": overlap == "true" for key in _FLAGS[1:]}
        directory = Path(f"trainer-{overlap}")
        torch.manual_seed(0)
        args = arguments(
            directory,
            max_steps=4,
            learning_rate=0.1,
            config_overrides={"ddp.use_distributed_optimizer": True, "ddp.bucket_cap_mb": 1e-5, **overrides},
        )
        model = Regression()
        model.layer = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Linear(8, 1))  # with rows for both ranks
        trainer = Trainer(model, args, train_dataset=regression_rows(32), callbacks=[Exports()])
        trainer.train()
        trainer.save_model(str(directory / "export-end"))
        found.append([digest(load_file(one)) for one in sorted(directory.glob("**/export-*/model.safetensors"))])
    return found
