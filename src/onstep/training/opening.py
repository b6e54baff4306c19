"""One way into a run, for both doors: folder, lock, environment, signals, watchdog, trackers, checkpoints, endings."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from onstep.config import ConfigContainer, resolve
from onstep.config.differences import describe
from onstep.distributed import World, attempt
from onstep.events import CallbackManager, Control, Dispatcher
from onstep.trackers.report_to import attach_trackers
from onstep.training.bridge.global_state import GlobalState
from onstep.training.checkpointing.writing import open_checkpoints
from onstep.training.features import RUN, SECTIONS, SETUP
from onstep.training.reporting.bridge_trackers import check_trackers
from onstep.training.run import Door
from onstep.training.runs.run_dir import Claim, RunFolder, RunLock, Status, claim_run_folder

logger = logging.getLogger(__name__)

ClaimRun = Callable[[ConfigContainer, World], tuple[Claim | None, RunLock | None]]


@dataclass(frozen=True)
class OpenRun:
    """A run that is ready to be set up."""

    run: GlobalState
    manager: CallbackManager | None
    """The callbacks, with those that fill the configured trackers."""
    tell: Dispatcher
    claim: Claim | None
    """What its folder says of it; None for a run without one."""


@contextmanager
def open_run(
    config: ConfigContainer,
    manager: CallbackManager | None,
    join: Callable[[ConfigContainer], AbstractContextManager[World]],
    claim_run: ClaimRun,
    door: Door,
    *,
    takes_finished: bool = False,
) -> Iterator[OpenRun]:
    """Everything around a run, from its lock to its endings, however it ends. Collective.

    A run that is finished is opened no further than its folder, unless `takes_finished`.

    Args:
        config: the run's, validated.
        manager: whose callbacks hear of the run; the one that fills the configured trackers is added.
        join: joins the ranks, and leaves them at the end.
        claim_run: takes the run's folder.
        door: what the caller has for callbacks and the console.

    Raises:
        ConfigError: a tracker that cannot work, before anything is built.
    """
    manager = attach_trackers(manager, config)
    check_trackers(config)
    run = GlobalState(cfg=config, door=door)
    with run.features.open(SETUP, run, run.world), join(config) as world:
        claim, lock = claim_run(config, world)
        run.world, run.control = world, Control(rank=world.rank)
        if claim is not None:
            run.cfg, run.run_folder = resolve(claim.config, world.size), claim.folder
        tell = Dispatcher(manager, run)
        if claim is not None and claim.is_finished and not takes_finished:
            yield OpenRun(run, manager, tell, claim)
            return
        if claim is not None:
            if claim.changes and world.is_main:
                changed = describe(list(claim.changes))
                logger.info("the configuration has changed since this run started:\n%s", changed)
            run.cfg.run.name = claim.folder.path.name
            run.cfg.logger.logging_dir = run.cfg.logger.logging_dir or str(claim.folder.path)
        run.trackers.join(manager)
        door.fire = tell.fire
        try:
            with (
                world.error_scope(),
                run.features.open(RUN, run, world),
                _checkpoints(run, tell),
                world.no_collectives_after_an_error(),
            ):
                yield OpenRun(run, manager, tell, claim)
        finally:
            _record_end(run)
            if lock is not None:
                lock.release()


@contextmanager
def _checkpoints(run: GlobalState, tell: Dispatcher) -> Iterator[None]:
    """The run's checkpoints, and the one that it continues from."""
    run.checkpoints = checkpoints = open_checkpoints(run, tell)
    try:
        with run.features.open(SECTIONS, run, run.world):
            if checkpoints is not None:
                checkpoints.find()
            yield
    finally:
        if checkpoints is not None:
            checkpoints.close()


def _record_end(run: GlobalState) -> None:
    """Write into run.json how the run ended, on rank 0."""
    if run.run_folder is None or not run.world.is_main:
        return
    ending = run.ending
    status: Status = ending.ended or "failed"
    error = ending.first_failure or ending.error
    if ending.by_anomaly:  # fixed, it goes on; as it is, it comes to the same step again
        status, error = "failed", str(ending.stopped_by)
    left_early = run.exits.decided in ("interval", "duration", "straggler") or not ending.was_stopped
    if status == "stopped" and left_early:  # also by a callback's own sys.exit
        status = "paused"
    try:
        run.run_folder.finish(status, run.train_state.step, error)
    except OSError as failure:
        logger.warning("how the run ended (%s) could not be written: %s", status, failure)


def claim_for_all(config: ConfigContainer, world: World) -> tuple[Claim | None, RunLock | None]:
    """Take the run's folder on rank 0 and tell the others; None for a run without a name. Collective.

    Returns:
        The claim, and on rank 0 the lock that keeps a second process out of a run that is not finished.

    Raises:
        RunExistsError: on all ranks alike.
    """
    if config.run.name is None:
        return None, None
    claimed, error = attempt(lambda: claim_run_folder(config)) if world.is_main else (None, None)
    claim, lock = claimed if claimed is not None else (None, None)
    claim, error = world.share((claim, error))
    if error is not None:
        raise error
    return claim, lock


def already_finished(folder: RunFolder) -> str:
    """What a finished run says when it is started again."""
    content = folder.read()
    how = "is finished" if content.get("status") == "completed" else "was stopped"
    return (
        f"{folder.path} {how}: {content.get('step', 0)} steps, nothing left to do.\n"
        f"To extend it: more train.train_iters (or num_epochs) with --on-config-change apply. To train a new run "
        f"beside it: run.fresh=true. To give a run another name: run.name=NAME."
    )
