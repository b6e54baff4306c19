"""The table of what happens in a step, against a real step on which everything is due."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from small_runs import RaggedRows, TinyModel, eval_loader, run, small_state

from onstep import CallbackManager
from onstep.data import TrainLoader
from onstep.events import MOMENTS
from onstep.optim import TorchSchedulerAdapter, TrainingOptimizer
from onstep.training.order import STEP_ORDER, Work

RECORDED = 2
"""The step on which all is due."""


def expected() -> list[str]:
    return [entry.name if isinstance(entry, Work) else entry for entry in STEP_ORDER]


def record_step(folder: Path) -> list[str]:
    """What step 2 of a run did, each for the first time in it."""
    seen: list[str] = []
    is_on = [False]
    works = {entry.function.__code__: entry.name for entry in STEP_ORDER if isinstance(entry, Work)}
    manager = CallbackManager()

    def note(name: str) -> None:
        if is_on[0] and name not in seen:
            seen.append(name)

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or frame.f_code not in works:
            return
        name = works[frame.f_code]
        if name == expected()[0]:
            is_on[0] = frame.f_locals["self"]._state.train_state.step == RECORDED - 1
        note(name)

    for moment in MOMENTS:
        manager.register(moment.name, lambda _, name=moment.name: note(name))
    state = small_state(
        4,
        8,
        train_iters=3,
        step_batch_size_schedule="0:8 16:16",
        empty_unused_memory_level=2,
        train_sync_interval=1,
        manual_gc=True,
        manual_gc_interval=1,
        check_weight_hash_across_dp_replicas_interval=2,
    )
    state.cfg.train.global_batch_size = 16
    state.cfg.straggler.log_straggler = True
    state.cfg.profiling.use_pytorch_profiler, state.cfg.profiling.profile_step_end = True, 1
    state.cfg.profiling.profile_step_start, state.cfg.run.output_dir = 0, str(folder)
    state.cfg.logger.log_interval = state.cfg.validation.eval_interval = 2
    state.cfg.checkpoint.save, state.cfg.checkpoint.save_interval = str(folder / "checkpoints"), 2
    model = TinyModel()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = TorchSchedulerAdapter(torch.optim.lr_scheduler.ConstantLR(inner))
    data = TrainLoader(RaggedRows(64), micro_batch_size=4, global_batch_size=16)
    sys.setprofile(profile)
    try:
        run(
            state,
            manager,
            model=model,
            optimizer=TrainingOptimizer(inner),
            scheduler=scheduler,
            data=data,
            valid=eval_loader(),
        )
    finally:
        sys.setprofile(None)
    return seen


def test_a_real_step_does_everything_in_the_order_of_the_table(tmp_path: Path) -> None:
    assert record_step(tmp_path) == expected()


def test_the_table_has_every_moment_of_a_step_in_firing_order() -> None:
    told = [entry for entry in STEP_ORDER if isinstance(entry, str)]
    order = [moment.name for moment in MOMENTS]
    assert told == sorted(told, key=order.index)
    assert {moment.name for moment in MOMENTS if moment.per_step is not None} <= set(told)
