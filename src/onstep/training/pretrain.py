"""The functional door: everything of a run from one configuration."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from onstep.config import ConfigContainer, resolve
from onstep.config.differences import describe
from onstep.distributed import World, open_world, world_size_from_environment
from onstep.events import CallbackManager, Control, normalize_callbacks
from onstep.metrics.memory_history import start_memory_history_recording
from onstep.models import ModelHook
from onstep.sinks.reporting import check_reported
from onstep.training.checkpointing import open_checkpoints
from onstep.training.evaluation import evaluate_and_print_results
from onstep.training.exits import handled_signals
from onstep.training.fault_tolerance import monitored
from onstep.training.final_weights import save_weights
from onstep.training.finishing import _finish_train
from onstep.training.forward_step import forward_step
from onstep.training.pretrained import fill_from_pretrained
from onstep.training.run_folder import Claim, RunFolder, Status, claim_run_folder
from onstep.training.run_lock import RunLock
from onstep.training.scope import RunScope
from onstep.training.setup import Parts, set_environment, set_up
from onstep.training.state import GlobalState
from onstep.training.telling import Teller
from onstep.training.trackers import check_trackers, closing_trackers
from onstep.training.train import train
from onstep.training.watchdog import watched

logger = logging.getLogger(__name__)


def pretrain(
    config: ConfigContainer,
    forward_step_func: Callable[..., Any] = forward_step,
    callbacks: list[Any] | CallbackManager | None = None,
    *,
    pre_wrap_hooks: Sequence[ModelHook] = (),
) -> GlobalState:
    """Train a language model as `config` says, then evaluate it on the validation and test sets. Collective.

    The configuration is validated and copied; the caller's is never written to. The global random generators of Python,
    NumPy and torch are seeded from `rng.seed`, so the same configuration gives the same losses bit for bit on the same
    machine; what was drawn from them before is lost. With `config.run.name` the run keeps a
    folder and has an identity: a completed run of the same configuration is not trained again. With
    `checkpoint.pretrained_checkpoint` it starts from trained weights: see `finetune`.

    Args:
        config: the run's configuration, for example of a recipe.
        forward_step_func: one of the documented signatures; the default predicts the next token.
        callbacks: a list of callbacks of any convention, a `CallbackManager`, or None.
        pre_wrap_hooks: each is given the list of the model's chunks before they are moved to the device and wrapped for
            data parallelism, and changes them in place or gives another list; the optimizer and checkpoints follow.

    Returns:
        The state of the run, with its progress and `log_history`.

    Raises:
        ConfigError: before anything is built, naming value, rule and remedy.
        RunExistsError: when the run's folder holds another run.
        NonFiniteError: when a loss or gradient norm is NaN or infinite.
    """
    config = resolve(fill_from_pretrained(config), world_size_from_environment())
    manager = normalize_callbacks(callbacks)
    check_reported(config, manager.callbacks if manager is not None else ())
    check_trackers(config)
    set_environment(config)
    if config.logger.logging_level is not None:
        logging.getLogger("onstep").setLevel(config.logger.logging_level)
    world = open_world(config.dist)
    try:
        return _run(config, world, forward_step_func, manager, tuple(pre_wrap_hooks))
    finally:
        world.close()


def _run(
    config: ConfigContainer,
    world: World,
    forward_step_func: Callable[..., Any],
    manager: CallbackManager | None,
    pre_wrap_hooks: Sequence[ModelHook],
) -> GlobalState:
    claim, lock = claim_for_all(config, world)
    if claim is not None:
        config = resolve(claim.config, world.size)
    state = GlobalState(cfg=config, world=world, control=Control(rank=world.rank))
    state.run_folder = claim.folder if claim is not None else None
    if claim is not None and claim.is_finished:
        if world.is_main:
            print(already_finished(claim.folder), flush=True)  # noqa: T201 - the answer to the command
        return state
    if claim is not None:
        say_changes(claim, world)
        config.run.name = claim.folder.path.name
        config.logger.logging_dir = config.logger.logging_dir or str(claim.folder.path)
    state.prints_console_line = not shows_progress(manager)
    tell = Teller(manager, state)
    try:
        with handled_signals(state), watched(state), closing_trackers(state), RunScope(tell):
            start_memory_history_recording(config.profiling)
            state.forward_step_func, state.pre_wrap_hooks = forward_step_func, pre_wrap_hooks
            state.checkpoints = open_checkpoints(state, tell)
            with monitored(state):
                if state.checkpoints is not None:
                    state.checkpoints.find()
                parts = set_up(state, tell)
                try:
                    _train_and_evaluate(state, parts, forward_step_func, manager, tell)
                    _finish_train(state)
                finally:
                    parts.close()
                    if state.checkpoints is not None:
                        state.checkpoints.close()
    finally:
        record_end(state)
        if lock is not None:
            lock.release()
    return state


def record_end(state: GlobalState) -> None:
    """Write into run.json how the run ended, on rank 0."""
    if state.run_folder is None or not state.world.is_main:
        return
    status: Status = state.ended or "failed"
    error = state.first_failure or state.error
    if state.ended_by_anomaly:  # mended, it goes on; as it is, it comes to the same step again
        status, error = "failed", str(state.stopped_by)
    left_early = state.exits.decided in ("interval", "duration", "straggler") or not state.was_stopped
    if status == "stopped" and left_early:  # also by a callback's own sys.exit
        status = "paused"
    try:
        state.run_folder.finish(status, state.train_state.step, error)
    except OSError as failure:
        logger.warning("how the run ended (%s) could not be written: %s", status, failure)


def _train_and_evaluate(
    state: GlobalState,
    parts: Parts,
    forward_step_func: Callable[..., Any],
    manager: CallbackManager | None,
    tell: Teller,
) -> None:
    progress = state.train_state
    if progress.do_train:
        train(
            forward_step_func,
            parts.model,
            parts.optimizer,
            parts.scheduler,
            parts.train_data,
            parts.valid_data if progress.do_valid else None,
            state,
            callback_manager=manager,
        )
        load_best_model(state, parts.model)
        save_weights(state, parts.model)
    aborted = state.control.should_abort_without_save or state.exits.decided is not None
    if aborted or not is_evaluated_after_training(state):
        return
    for is_wanted, data, name, is_test in (
        (progress.do_valid, parts.valid_data, "validation", False),
        (progress.do_test, parts.test_data, "test", True),
    ):
        if is_wanted:
            state.evaluation_is_whole = True  # a signal ends it here: all of it is made again by the next process
            prefix = f"iteration {progress.step} on {name} set"
            model_config = state.cfg.model
            evaluate_and_print_results(
                state,
                prefix,
                forward_step_func,
                data,
                parts.model,
                model_config,
                verbose=state.prints_console_line,
                is_test=is_test,
                tell=tell,
            )


def is_evaluated_after_training(state: GlobalState) -> bool:
    """Whether validation and test follow the training; a run that only evaluates always does."""
    validation = state.cfg.validation
    return validation.eval_after_training or validation.skip_train


def claim_for_all(config: ConfigContainer, world: World) -> tuple[Claim | None, RunLock | None]:
    """Take the run's folder on rank 0 and tell the others; None for a run without a name. Collective.

    Returns:
        The claim, and on rank 0 the lock that keeps a second process out of a run that is not finished.

    Raises:
        RunExistsError: on all ranks alike.
    """
    if config.run.name is None:
        return None, None
    outcome: Claim | Exception | None = None
    lock: RunLock | None = None
    if world.is_main:
        try:
            outcome, lock = claim_run_folder(config)
        except Exception as error:  # noqa: BLE001 - raised below, on every rank
            outcome = error
    outcome = world.share(outcome)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome, lock


def say_changes(claim: Claim, world: World) -> None:
    """Show which values of the configuration differ from those that the run started with, on rank 0."""
    if claim.changes and world.is_main:
        logger.info("the configuration has changed since this run started:\n%s", describe(list(claim.changes)))


def load_best_model(state: GlobalState, model: list[Any]) -> None:
    """With `checkpoint.load_best_model_at_end`, load the weights of the best checkpoint; progress stays. Collective."""
    if state.cfg.checkpoint.load_best_model_at_end and state.checkpoints is not None and state.exits.decided is None:
        state.checkpoints.load_best_model(model)


def already_finished(folder: RunFolder) -> str:
    """What a finished run says when it is started again."""
    content = folder.read()
    how = "is finished" if content.get("status") == "completed" else "was stopped"
    return (
        f"{folder.path} {how}: {content.get('step', 0)} steps, nothing left to do.\n"
        f"To extend it: more train.train_iters (or num_epochs) with --on-config-change apply. To train a new run "
        f"beside it: run.fresh=true. To give a run another name: run.name=NAME."
    )


def shows_progress(manager: CallbackManager | None) -> bool:
    """Whether a registered callback reports progress itself."""
    return manager is not None and any(getattr(callback, "shows_progress", False) for callback in manager.callbacks)
