"""Runs a training: opens the features of the run around the loop, for every entry point."""

from __future__ import annotations

import logging

from onstep.data.loaders.dead_workers import dead_workers_named
from onstep.optim import check_length
from onstep.training.checkpointing.opening import own_checkpoints
from onstep.training.fault_tolerance.sections import sections_of
from onstep.training.features import RUN, SECTIONS, TRAINING
from onstep.training.loop import Loop
from onstep.training.profiling.profilers import check_profilers
from onstep.training.stages.ending import exit_if_preempted
from onstep.training.stages.job import Job, warn_of_parameters_left_out, warn_of_wrapper
from onstep.training.stages.left_out import warn_of_hidden_weights

logger = logging.getLogger(__name__)


def run_job(job: Job) -> None:
    """Train until the configured number of steps, or until a stop is requested. Collective.

    A run that nothing has opened has its own checkpoints here, in `checkpoint.save`.

    Raises:
        ConfigError: if both `profiling.use_pytorch_profiler` and a callback profile, or the schedule ends before the
            run.
        Preempted: if a signal has ended the training.
    """
    run, notify = job.run, job.notify
    check_profilers(run.cfg.profiling, notify.manager)
    run.bridge_trackers.join(notify.manager)
    is_by_hand = not run.ending.in_run
    if is_by_hand:
        run.entry_point.fire = notify.fire
    with (
        run.world.error_scope(),
        run.features.open(RUN, run, run.world),
        own_checkpoints(run, notify, job.trained),
        run.features.open(() if sections_of(run).client is None else SECTIONS, run, run.world),
        run.features.open((*TRAINING, *run.features.instruments), job, run.world),
        dead_workers_named(),
        run.world.no_collectives_after_an_error(),
    ):
        if is_by_hand and run.has_all_steps and not run.is_resumed and run.world.is_main:
            logger.warning(
                "nothing is trained: the state has done its %d steps; make a new GlobalState, or raise train_iters",
                run.train_state.step,
            )
        check_length(job.scheduler, run.train_state.step, run.train_iters)
        warn_of_parameters_left_out(job)
        warn_of_hidden_weights(job.model, is_main=run.world.is_main)
        warn_of_wrapper(job)
        try:
            Loop(job).train()
        finally:
            run.world.unlimit()
    exit_if_preempted(run)
