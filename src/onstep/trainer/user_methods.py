"""Connects a run with the reporting and saving methods that a user's Trainer overrides, for the time of a call."""

from __future__ import annotations

import inspect
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from onstep.config.hf.argument import LOG_LEVELS
from onstep.events import Dispatcher
from onstep.trainer.methods import TrainerMethods
from onstep.trainer.overrides import overrides
from onstep.trainer.reporting.changed_arguments import watched_arguments
from onstep.trainer.reporting.input_counts import InputCounts
from onstep.training.run import Run


@contextmanager
def user_methods(trainer: TrainerMethods, run: Run, notify: Dispatcher, *, trains: bool) -> Iterator[None]:
    """Let records, saves and FLOPs pass through the methods that are overridden; others cost nothing."""
    entry, args = run.entry_point, trainer.args
    counts_flops = overrides(trainer, "floating_point_ops") or overrides(trainer, "store_flos")
    kind = str(args.include_num_input_tokens_seen)
    counts: InputCounts | None = None
    if trains and (kind != "no" or counts_flops or trainer.memory.enabled):
        counts = InputCounts(trainer, run, kind=kind, counts_flops=counts_flops)
        trainer.callback_manager.add(counts)
    if trains:
        trainer.input_counts = counts if kind != "no" else None
        entry.check_arguments = watched_arguments(args, entry.given_args)
    entry.logs_skipped_losses = not args.logging_nan_inf_filter
    entry.log = _log(trainer) if kind != "no" or overrides(trainer, "log") else None
    entry.store_flos = trainer.store_flos if counts_flops else None
    saves = any(overrides(trainer, name) for name in ("_save_checkpoint", "save_model", "_save"))
    entry.save_checkpoint = _save(trainer, run, notify) if saves else None
    try:
        with replica_level(args), trainer.memory.measured("train") if trains else nullcontext():
            yield
    finally:
        entry.log = entry.store_flos = entry.save_checkpoint = None
        if counts is not None:
            trainer.callback_manager.remove(counts)


def _log(trainer: TrainerMethods) -> Callable[[dict[str, Any]], None]:
    """`trainer.log`, with the start of the training for the record of a step, if it accepts one."""
    started, accepts_start = time.time(), len(inspect.signature(trainer.log).parameters) > 1

    def log(logs: dict[str, Any]) -> None:
        if accepts_start and "loss" in logs:
            trainer.log(logs, started)
        else:
            trainer.log(logs)

    return log


def _save(trainer: TrainerMethods, run: Run, notify: Dispatcher) -> Callable[[Callable[..., None]], None]:
    """A save through `trainer._save_checkpoint`; where it does not call `super()`, what it wrote is the save.

    It is called once for a step, as by Hugging Face's Trainer. The end of training saves the last step again, since it
    adds a record: what was written beside the first checkpoint is kept.
    """
    written: dict[int, bool] = {}
    """Whether the user's method called `super()`, by step."""

    def save(write: Callable[..., None]) -> None:
        step = run.train_state.step

        def write_for_user() -> None:
            written[step] = True
            write(adopts=True)
            if run.checkpoints is not None:
                run.checkpoints.finish()  # the user's code may add files to the checkpoint

        if written.get(step):
            write_for_user()
            return
        if step not in written:
            written[step] = False
            trainer.write_checkpoint = write_for_user
            try:
                trainer._save_checkpoint(trainer.model, None)
            finally:
                trainer.write_checkpoint = None
            if not written[step]:
                path = os.path.join(trainer._get_output_dir(None), f"checkpoint-{step}")
                notify.on_checkpoint_save(checkpoint_step=step, checkpoint_path=path)
        run.saving.is_unsaved = False

    return save


@contextmanager
def replica_level(args: Any) -> Iterator[None]:
    """Set the level of Onstep's messages to `log_level_replica`, except on the ranks that report."""
    level = LOG_LEVELS[args.log_level_replica]
    if args.should_log or level is None:
        yield
        return
    log = logging.getLogger("onstep")
    before = log.level
    log.setLevel(level)
    try:
        yield
    finally:
        log.setLevel(before)
