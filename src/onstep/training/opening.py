"""Opens a run for every entry point: directory, lock, environment, signals, watchdog, trackers, checkpoints,
endings.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from onstep.config import ConfigContainer, resolve
from onstep.config.checks import idle_line, idle_settings
from onstep.config.checks.run import check_rollback_policies
from onstep.config.differences import describe
from onstep.config.short_runs import fit_short_run
from onstep.distributed import World, attempt
from onstep.errors import ConfigError, DataError, MissingExtraError, OnstepError, RunExistsError, forget_warnings
from onstep.events import CallbackManager, Control, Dispatcher
from onstep.events.settings import no_rollback_of
from onstep.processes.forking import check_imports_are_done
from onstep.recipes import RECIPES
from onstep.trackers.report_to import attach_trackers
from onstep.training.checkpointing.opening import open_checkpoints
from onstep.training.features import RUN, SECTIONS, SETUP
from onstep.training.lifecycle.signal_handling import SignalHandling
from onstep.training.reporting.bridge_trackers import check_trackers
from onstep.training.run import Run
from onstep.training.runs.claims import Claim, acquire_run_dir, without_effect
from onstep.training.runs.hold import Hold, abandoned_on_error
from onstep.training.runs.identity import Identify, Identity, remembered
from onstep.training.runs.mirrored import helping
from onstep.training.runs.run_dir import FINISHED, Status
from onstep.training.runs.sent_commands import what_ended
from onstep.training.runs.shared_place import check_seen
from onstep.training.runs.signals import Preempted
from onstep.training.watchdog.stacks import callback_of_error

logger = logging.getLogger(__name__)

ClaimRun = Callable[[ConfigContainer, World], tuple[Claim | None, Hold | None]]


@dataclass(frozen=True)
class OpenRun:
    """A run that is ready for its set-up."""

    notify: Dispatcher
    """Fires its events, to the callbacks and to those that feed the configured trackers."""
    claim: Claim | None
    """The state recorded in its directory; None for a run without one."""


@contextmanager
def open_run(
    run: Run,
    manager: CallbackManager | None,
    join: Callable[[ConfigContainer], AbstractContextManager[World]],
    claim_run: ClaimRun,
    *,
    accepts_finished: bool = False,
) -> Iterator[OpenRun]:
    """Set up everything around a run, from its lock to its endings, and tear it down however it ends. Collective.

    Only the directory of a finished run is opened, unless `accepts_finished`.

    Args:
        run: a new run in a world of its own, with a validated configuration.
        manager: the callbacks of the run; the one that feeds the configured trackers is added.
        join: joins the ranks, and leaves them at the end.
        claim_run: claims the run's directory.

    Raises:
        ConfigError: for a tracker that cannot work, before anything is built.
    """
    config = run.cfg
    check_imports_are_done()
    forget_warnings()
    callbacks = manager.callbacks if manager is not None else []
    has_trackers = any(hasattr(callback, "tag_loggers") for callback in callbacks)
    manager = attach_trackers(manager, config)
    check_trackers(config)
    for callback in callbacks:
        check_start = getattr(callback, "check_start", None)
        if callable(check_start):
            check_start()
    check_rollback_policies(config, no_rollback_of(callbacks))
    with run.features.open(SETUP, run, run.world), join(config) as world:
        claim, hold = claim_run(config, world)
        with abandoned_on_error(hold):
            run.world, run.control = world, Control(rank=world.rank)
            if claim is not None:
                run.cfg, run.run_dir = resolve(claim.config, world.size), claim.directory
                if hold is None:
                    run.run_dir.work_in(None)
                else:
                    run.run_dir.work_in(hold.lock, None if hold.mirrored is None else hold.mirrored.mirror)
                check_seen(run.run_dir.path, world, is_held=hold is not None)
            notify = Dispatcher(manager, run)
        if claim is not None and claim.is_finished and not accepts_finished:
            yield OpenRun(notify, claim)
            return
        with abandoned_on_error(hold):
            if claim is not None:
                _name_claim(run, claim)
            if world.is_main:
                _name_idle_settings(run, has_trackers)
            run.bridge_trackers.join(manager)
            run.entry_point.fire = notify.fire
        with _held(run, hold):
            try:
                with (
                    world.error_scope(),
                    run.features.open(RUN, run, world),
                    _checkpoints(run, notify, claim),
                    world.no_collectives_after_an_error(),
                ):
                    yield OpenRun(notify, claim)
            except BaseException as error:
                is_undone = False
                try:
                    is_undone = not isinstance(error, SystemExit) and _undo_start(run, hold, error)
                finally:  # out of memory, undoing fails too
                    if not is_undone:
                        _record_end(run)
                if not isinstance(error, SystemExit):
                    _name_threads_left()
                raise
            _record_end(run)


@contextmanager
def _held(run: Run, hold: Hold | None) -> Iterator[None]:
    """Hold the directory until the run has ended, and what is left of a mirrored one is uploaded; handle signals as
    long.
    """
    is_helper = run.run_dir is not None and run.cfg.run.is_in_store and not run.world.is_main
    try:
        with (
            run.features.open((SignalHandling,), run, run.world),
            helping(run.cfg, run.run_dir.path) if is_helper and run.run_dir is not None else nullcontext(),
        ):
            try:
                yield
            except BaseException:
                if hold is not None:
                    hold.release()
                raise
            if hold is not None:
                hold.finish()
    finally:
        if hold is not None:
            hold.release()


def _name_claim(run: Run, claim: Claim) -> None:
    """Say what has changed since the run started, and give its parts the name of its directory."""
    if claim.changes and run.world.is_main:
        logger.info("the configuration has changed since this run started:\n%s", describe(list(claim.changes)))
    for note in claim.notes if run.world.is_main else ():
        logger.warning("%s", note)
    run.cfg.run.name = claim.directory.path.name
    run.cfg.logger.logging_dir = os.path.abspath(run.cfg.logger.logging_dir or claim.directory.path)


def _undo_start(run: Run, hold: Hold | None, error: BaseException) -> bool:
    """Restore the run's directory if an error ended the run before it took a step; whether that was done.

    From `on_train_start` on, an earlier run's metrics log may have been cut to its checkpoint, which is not undone. Its
    record, unless it was finished, then says that it failed, and so it does where the start was not refused but failed,
    in a callback or while it loaded. The record of a failure that one rank caused is kept, and it replaces that of an
    earlier failure.
    """
    if hold is None or run.run_dir is None or (run.ending.training != "before" and run.stage.has_stepped):
        return False
    ending, has_culprit = run.ending, run.ending.first_failure is not None
    if not hold.had_run:
        return not has_culprit and not (ending.training != "before" and run.stage.epoch_is_open) and hold.undo()
    if not (hold.undo_records() if ending.training != "before" else hold.undo()):
        return False
    status = run.run_dir.read().get("status")
    if ending.training != "before" or has_culprit or not _is_refusal(error):
        return status in FINISHED
    # the record of a process that was killed says that it runs
    return status != "running" and not (status == "failed" and ending.error is not None)


def _is_refusal(error: BaseException) -> bool:
    """Whether a start was refused, or given up by Ctrl-C, rather than failed in a callback or while it loaded."""
    if isinstance(error, KeyboardInterrupt):
        return True
    is_refused = isinstance(error, (ConfigError, DataError, RunExistsError, MissingExtraError))
    return is_refused and callback_of_error(error) == (None, None)


def _name_threads_left() -> None:
    """Name the threads that Python waits for at the end of a process; the error of the run is shown before."""
    main = threading.main_thread()
    names = [thread.name for thread in threading.enumerate() if not thread.daemon and thread is not main]
    if names:
        logger.warning(
            "the run has failed, but its process lives until these threads end, which are not daemon threads: %s; "
            "start them with daemon=True, or end them in on_run_end",
            ", ".join(names),
        )


def _name_idle_settings(run: Run, has_trackers: bool) -> None:
    """Say in one line which settings have no effect in this run, whose user may have trackers of their own."""
    make = RECIPES.get(run.cfg.run.recipe or "")
    recipes = [] if make is None else [make(), make()]
    for fitted in recipes[1:]:
        fitted.train.train_iters = run.cfg.train.train_iters
        fit_short_run(fitted, recipes[0], ())
    found = idle_settings(run.cfg, recipes, has_trackers=has_trackers)
    found += run.entry_point.idle_settings(run.cfg)
    line = idle_line(found)
    if line is not None:
        logger.warning("%s", line)


@contextmanager
def _checkpoints(run: Run, notify: Dispatcher, claim: Claim | None) -> Iterator[None]:
    """Open the run's checkpoints, and the one that it continues from."""
    run.checkpoints = checkpoints = open_checkpoints(run, notify, claim)
    try:
        with run.features.open(SECTIONS, run, run.world):
            if checkpoints is not None:
                checkpoints.find()
            yield
        if checkpoints is not None:
            checkpoints.end()
    finally:
        if checkpoints is not None:
            checkpoints.close()


def _record_end(run: Run) -> None:
    """Record in run.json how the run ended, on rank 0."""
    if run.run_dir is None or not run.world.is_main:
        return
    ending = run.ending
    status: Status = "failed" if ending.first_failure else ending.ended or "failed"
    error = ending.first_failure or ending.error
    if ending.by_anomaly:  # it can continue once fixed; unchanged, it would fail at the same step
        status, error = "failed", str(ending.stopped_by)
    left_early = run.exits.decided in ("interval", "duration", "straggler") or not ending.was_stopped
    if status == "stopped" and left_early:  # also by a callback's own sys.exit
        status = "paused"
    failure = None if run.checkpoints is None else run.checkpoints.failure
    if status in FINISHED and failure is not None:  # the same command continues it, and saves its end
        status, error = "failed", f"the end of the run is not saved: {failure.rstrip('.')}."
        logger.error("%s Once it can be written, run the same command again: it continues from there.", error)
    try:
        run.run_dir.finish(status, run.train_state.step, error)
    except (OSError, OnstepError) as failure:
        logger.warning("the end of the run (%s) could not be recorded: %s", status, failure)


def claim_for_all(
    config: ConfigContainer,
    world: World,
    identify: Identify | None = None,
    acquire: Callable[[ConfigContainer, Identify | None], tuple[Claim, Hold | None]] = acquire_run_dir,
) -> tuple[Claim | None, Hold | None]:
    """Claim the run's directory on rank 0 and share the result; None for a run without a name. Collective.

    Args:
        config: the run's configuration.
        world: the ranks.
        identify: see `acquire_run_dir`.
        acquire: claims it on rank 0.

    Returns:
        The claim, and on rank 0 the hold that keeps a second process out of an unfinished run.

    Raises:
        RunExistsError: on all ranks alike.
        DataError: likewise, if a rank finds other data than rank 0.
    """
    if config.run.name is None:
        return None, None
    if identify is not None:
        identify = remembered(identify)
        _check_same_data(identify(config), world)
    claimed, error = _acquired(lambda: acquire(config, identify)) if world.is_main else (None, None)
    claim, hold = claimed if claimed is not None else (None, None)
    with abandoned_on_error(hold):
        claim, error = world.share((claim, error))
    if error is not None:
        raise error
    return claim, hold


def _acquired(
    acquire: Callable[[], tuple[Claim, Hold | None]],
) -> tuple[tuple[Claim, Hold | None] | None, BaseException | None]:
    """The directory that is claimed, or why it is not: also since a signal has ended an upload that was left to do."""
    try:
        return attempt(acquire)
    except Preempted as preempted:
        return None, preempted


def _check_same_data(own: Identity, world: World) -> None:
    """Compare what the ranks read, which each of them needs to know to find its tokens. Collective.

    Raises:
        DataError: on all ranks alike.
    """
    first, *others = world.gather((own.read_by_all, own.problem))
    for rank, (digests, problem) in enumerate(others, start=1):
        if (digests, problem) != first:
            different = [name for name in {**first[0], **digests} if first[0].get(name) != digests.get(name)]
            is_files = "data" in digests or "tokenizer" in digests
            reason = problem or first[1] or f"{'its files of ' * is_files}the {' and the '.join(different)} differ"
            remedy = "Copy the same files to all machines, or use a shared file system"
            raise DataError(
                f"{world.place(rank)} does not read what rank 0 reads: {reason}. "
                f"{remedy if is_files or problem else 'Pass the same dataset on all ranks'}."
            )


def already_finished(claim: Claim) -> str:
    """The message for a finished run that is started again."""
    directory, content = claim.directory, claim.directory.read()
    how = "is finished" if content.get("status") == "completed" else "was stopped"
    ended = what_ended(directory.decisions, content.get("step", 0))
    notes = "".join(f"Note: {note}.\n" for note in (ended, *claim.notes, without_effect(claim.config)) if note)
    return (
        f"{directory.path} {how}: {content.get('step', 0)} steps, nothing left to do.\n{notes}"
        f"To extend it: more train.train_iters (or num_epochs) with --on-config-change apply. To train a new run "
        f"beside it: run.fresh=true. To use another name: run.name=NAME."
    )
