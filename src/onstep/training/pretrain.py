"""The functional door: everything of a run from one configuration, anew or from trained weights."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, closing

from torch import nn

from onstep.config import ConfigContainer, resolve
from onstep.config.load import typed_copy
from onstep.distributed import World, open_world, world_size_from_environment
from onstep.errors import ConfigError
from onstep.events import CallbackManager, Dispatcher, normalize_callbacks
from onstep.models import ModelHook
from onstep.training.bridge.global_state import GlobalState
from onstep.training.bridge.housekeeping import _finish_train
from onstep.training.opening import already_finished, claim_for_all, open_run
from onstep.training.protocols import ForwardStep
from onstep.training.run import Door, Run
from onstep.training.setup.final_weights import save_weights
from onstep.training.setup.pretrained import fill_from_pretrained
from onstep.training.setup.setup import Parts, set_up
from onstep.training.stages.evaluation import evaluate_and_print_results
from onstep.training.stages.forward_step import forward_step
from onstep.training.train import train


def pretrain(
    config: ConfigContainer,
    forward_step_func: ForwardStep = forward_step,
    callbacks: list[object] | CallbackManager | None = None,
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
    door = Door(
        forward_step_func=forward_step_func,
        pre_wrap_hooks=tuple(pre_wrap_hooks),
        prints_console_line=not shows_progress(manager),
    )
    with open_run(config, manager, _joined, claim_for_all, door) as opened:
        run, tell, claim = opened.run, opened.tell, opened.claim
        if claim is not None and claim.is_finished:
            if run.world.is_main:
                print(already_finished(claim.folder), flush=True)  # noqa: T201 - the answer to the command
            return run
        parts = set_up(run, tell)
        try:
            _train_and_evaluate(run, parts, forward_step_func, opened.manager, tell)
            _finish_train(run)
        finally:
            parts.close()
    return run


def finetune(
    config: ConfigContainer,
    forward_step_func: ForwardStep = forward_step,
    callbacks: list[object] | CallbackManager | None = None,
    *,
    pre_wrap_hooks: Sequence[ModelHook] = (),
) -> GlobalState:
    """Train trained weights further, from `checkpoint.pretrained_checkpoint` or `checkpoint.load`. Collective.

    These name a Hugging Face folder with safetensors, a run, or a checkpoint of Onstep. Only its weights are taken:
    steps, optimizer, data position and random state start anew. A run that has checkpoints of its own continues from
    them instead. The model section is filled from the weights, or must agree with them. With `peft.peft_scheme` lora a
    few added weights are trained; the run then leaves them in `adapter/`, beside the merged weights in `model/`.

    Args:
        config: the run's configuration, for example of a recipe's `finetune` form.
        forward_step_func: as `pretrain` takes it.
        callbacks: as `pretrain` takes them.
        pre_wrap_hooks: as `pretrain` takes them; they see the trained weights.

    Returns:
        The state of the run, with its progress and `log_history`.

    Raises:
        ConfigError: when neither of the two is set, or the model is another one than the weights'.
        MissingWeightsError: when nothing that could be loaded is there; also a FileNotFoundError.
    """
    if config.checkpoint.pretrained_checkpoint is None and config.checkpoint.load is None:
        raise ConfigError(
            "finetune takes weights to start from; set checkpoint.pretrained_checkpoint (a Hugging Face folder, a run "
            "or a checkpoint) or checkpoint.load."
        )
    config = typed_copy(config)
    config.checkpoint.finetune = True
    return pretrain(config, forward_step_func, callbacks, pre_wrap_hooks=pre_wrap_hooks)


def _joined(config: ConfigContainer) -> AbstractContextManager[World]:
    """The ranks, until the run is over."""
    return closing(open_world(config.dist))


def _train_and_evaluate(
    state: GlobalState,
    parts: Parts,
    forward_step_func: ForwardStep,
    manager: CallbackManager | None,
    tell: Dispatcher,
) -> None:
    progress = state.train_state
    if progress.do_train and parts.optimizer is not None:
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
    for is_wanted, data, is_test in (
        (progress.do_valid, parts.valid_data, False),
        (progress.do_test, parts.test_data, True),
    ):
        if is_wanted and data is not None:
            state.evaluated.is_restartable = True  # a signal ends it here: all of it is made again by the next process
            prefix = f"iteration {progress.step} on {'test' if is_test else 'validation'} set"
            evaluate_and_print_results(
                state,
                prefix,
                forward_step_func,
                data,
                parts.model,
                state.cfg.model,
                verbose=state.door.prints_console_line,
                is_test=is_test,
                tell=tell,
            )


def is_evaluated_after_training(state: Run) -> bool:
    """Whether validation and test follow the training; a run that only evaluates always does."""
    validation = state.cfg.validation
    return validation.eval_after_training or validation.skip_train


def load_best_model(state: Run, model: list[nn.Module]) -> None:
    """With `checkpoint.load_best_model_at_end`, load the weights of the best checkpoint; progress stays. Collective."""
    if state.cfg.checkpoint.load_best_model_at_end and state.checkpoints is not None and state.exits.decided is None:
        state.checkpoints.load_best_model(model)


def shows_progress(manager: CallbackManager | None) -> bool:
    """Whether a registered callback reports progress itself."""
    return manager is not None and any(getattr(callback, "shows_progress", False) for callback in manager.callbacks)
