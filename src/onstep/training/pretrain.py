"""Provides `pretrain` and `finetune`: complete runs from one configuration, from scratch or from pretrained weights."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, closing
from functools import partial
from typing import cast

from torch import nn

from onstep.config import ConfigContainer, resolve
from onstep.config.keys import own_copy
from onstep.config.sequence_lengths import fit_changed_seq_length
from onstep.config.short_runs import with_fitting_warmup
from onstep.console import with_progress
from onstep.distributed import World, open_world, world_size_from_environment
from onstep.errors import ConfigError
from onstep.events import CallbackManager, Dispatcher, normalize_callbacks
from onstep.metrics.memory.fitting import check_memory
from onstep.models import ModelHook
from onstep.optim.named_optimizers import check_configured
from onstep.recipes import RECIPES
from onstep.training.bridge.global_state import GlobalState
from onstep.training.bridge.housekeeping import _finish_train
from onstep.training.entry_point import EntryPoint
from onstep.training.opening import ClaimRun, already_finished, claim_for_all, open_run
from onstep.training.protocols import ForwardStep
from onstep.training.run import Run
from onstep.training.run_job import run_job
from onstep.training.runs.claims import Claim, acquire_run_dir
from onstep.training.runs.facts import facts_of
from onstep.training.runs.hold import Hold
from onstep.training.runs.identity import Identity, configured_identity
from onstep.training.runs.pinned_data import pin_datasets
from onstep.training.runs.user_code import entries_of
from onstep.training.serving.trainer_control_callback import add_control
from onstep.training.setup.final_weights import save_weights
from onstep.training.setup.outlines import check_blocks
from onstep.training.setup.pretrained import fill_from_pretrained
from onstep.training.setup.setup import TrainingSetup, set_up
from onstep.training.stages.evaluation_report import evaluate_and_print_results
from onstep.training.stages.exits import CurrentEvaluation
from onstep.training.stages.forward_step import forward_step
from onstep.training.stages.job import Job

logger = logging.getLogger(__name__)


def pretrain(
    config: ConfigContainer,
    forward_step_func: ForwardStep = forward_step,
    callbacks: list[object] | CallbackManager | None = None,
    *,
    pre_wrap_hooks: Sequence[ModelHook] = (),
) -> GlobalState:
    """Train a language model as `config` says, then evaluate it on the validation and test sets. Collective.

    The configuration is validated and copied; the caller's is never modified. The global random generators of Python,
    NumPy and torch are seeded from `rng.seed`, so the same configuration gives bitwise the same losses on the same
    machine; their previous state is lost. With `config.run.name` the run has a directory and an identity: a completed
    run of the same configuration is not trained again. With `checkpoint.pretrained_checkpoint` it starts from
    pretrained weights: see `finetune`.

    Args:
        config: the run's configuration, for example from a recipe.
        forward_step_func: a function with one of the documented signatures; the default predicts the next token.
        callbacks: a list of callbacks of any convention, a `CallbackManager`, or None.
        pre_wrap_hooks: each is called with the list of the model's chunks before they are moved to the device and
            wrapped for data parallelism, and modifies them in place or returns another list; the optimizer and
            checkpoints use the result.

    Returns:
        The state of the run, with its progress and `log_history`.

    Raises:
        ConfigError: before anything is built, naming value, rule and remedy.
        RunExistsError: if the run's directory holds another run, or one whose data or tokenizer files have changed.
        NonFiniteError: if a loss or gradient norm is NaN or infinite.
    """
    run, manager = configured_run(config, forward_step_func, callbacks)
    train_configured(run, manager, pre_wrap_hooks)
    return run


def finetune(
    config: ConfigContainer,
    forward_step_func: ForwardStep = forward_step,
    callbacks: list[object] | CallbackManager | None = None,
    *,
    pre_wrap_hooks: Sequence[ModelHook] = (),
) -> GlobalState:
    """Train pretrained weights further, from `checkpoint.pretrained_checkpoint` or `checkpoint.load`. Collective.

    These name a Hugging Face directory with safetensors, a run, or a checkpoint of Onstep. Only the weights are loaded:
    steps, optimizer, data position and random state start from scratch. A run that has its own checkpoints continues
    from them instead. The model section is filled in from the weights, or must agree with them. With `peft.peft_scheme`
    lora, a few added weights are trained; the run then saves them in `adapter/`, beside the merged weights in `model/`.

    Args:
        config: the run's configuration, for example from a recipe's `finetune` form.
        forward_step_func: see `pretrain`.
        callbacks: see `pretrain`.
        pre_wrap_hooks: see `pretrain`; they receive the pretrained weights.

    Returns:
        The state of the run, with its progress and `log_history`.

    Raises:
        ConfigError: if neither of the two is set, or the model differs from that of the weights.
        MissingWeightsError: if nothing loadable exists; also a FileNotFoundError.
    """
    config = own_copy(config)
    sources = (config.checkpoint.pretrained_checkpoint, config.checkpoint.load, config.model.hf_model)
    if sources == (None, None, None):
        raise ConfigError(
            "finetune requires weights to start from; set checkpoint.pretrained_checkpoint (a Hugging Face directory, "
            "a run or a checkpoint), model.hf_model (a Hugging Face directory) or checkpoint.load."
        )
    config.checkpoint.finetune = True
    return pretrain(config, forward_step_func, callbacks, pre_wrap_hooks=pre_wrap_hooks)


def configured_run(
    config: ConfigContainer, forward_step_func: ForwardStep, callbacks: list[object] | CallbackManager | None
) -> tuple[GlobalState, CallbackManager | None]:
    """A run of a configuration, which is copied, completed and checked, and its callbacks; see `pretrain`."""
    config = own_copy(config)
    recipe = RECIPES.get(config.run.recipe or "")
    base = None if recipe is None else recipe()
    fit_changed_seq_length(config, base or ConfigContainer())
    config, note = with_fitting_warmup(config, base)
    if note is not None:
        logger.warning("%s", note)
    config = resolve(fill_from_pretrained(config), world_size_from_environment())
    check_configured(config.optimizer)
    if config.run.check_memory:
        check_memory(config)
    manager = with_progress(normalize_callbacks(callbacks), config)
    if config.run.control:
        manager = CallbackManager() if manager is None else manager
        add_control(manager)
    entry_point = _Configured(forward_step_func=forward_step_func)
    return GlobalState(cfg=config, world=World(), entry_point=entry_point), manager


def claim_configured(
    config: ConfigContainer, world: World, user_code: Mapping[str, object] | None = None
) -> tuple[Claim | None, Hold | None]:
    """Claim the directory of a run on configured data. Collective."""
    acquire = partial(acquire_run_dir, revisions=pin_datasets(config, world), user_code=user_code)
    return claim_for_all(config, world, configured_identity, acquire)


def train_configured(
    run: GlobalState,
    manager: CallbackManager | None,
    pre_wrap_hooks: Sequence[ModelHook] = (),
    claim_run: ClaimRun | None = None,
) -> None:
    """Open a run of `configured_run`, train it and evaluate it. Collective.

    Its directory is claimed by `claim_run`, as a rule by `claim_configured`.
    """
    if not pre_wrap_hooks:  # which may add blocks
        check_blocks(run.cfg)
    if claim_run is None:
        user_code = {
            "callbacks": entries_of([] if manager is None else manager.callbacks),
            "forward_step": entries_of([run.entry_point.forward_step_func]),
            "pre_wrap_hooks": entries_of(pre_wrap_hooks),
        }
        claim_run = partial(claim_configured, user_code={kind: found for kind, found in user_code.items() if found})
    forward_step_func = cast(ForwardStep, run.entry_point.forward_step_func)
    with open_run(run, manager, _joined, claim_run) as opened:
        notify, claim = opened.notify, opened.claim
        if claim is not None and claim.is_finished:
            if run.world.is_main:
                print(already_finished(claim), flush=True)  # noqa: T201 - the answer to the command
            return
        setup = set_up(run, notify, pre_wrap_hooks)
        try:
            _train_and_evaluate(run, setup, forward_step_func, notify)
            _finish_train(run)
        finally:
            setup.close()


class _Configured(EntryPoint):
    """The entry point of a run on configured data."""

    def identify(self, config: ConfigContainer) -> Identity:
        return configured_identity(config)


def _joined(config: ConfigContainer) -> AbstractContextManager[World]:
    """Join the ranks until the run is over."""
    return closing(
        open_world(config.dist, config.parallel_sizes(world_size_from_environment()), partial(facts_of, config))
    )


def _train_and_evaluate(
    state: GlobalState, setup: TrainingSetup, forward_step_func: ForwardStep, notify: Dispatcher
) -> None:
    progress = state.train_state
    if progress.do_train and setup.optimizer is not None:
        job = Job.of(
            state, forward_step_func, setup.model, setup.optimizer, setup.scheduler, setup.train_data, notify.manager
        )
        job.valid_data_iterator = setup.valid_data if progress.do_valid else None
        run_job(job)
        load_best_model(state, setup.model)
        save_weights(state, setup.model)
    is_aborted = state.control.should_abort_without_save or state.exits.decided is not None
    [aborted] = state.world.agree(
        [int(is_aborted)]
    )  # a callback may have asked for it since the last step, on one rank
    if aborted or not is_evaluated_after_training(state):
        return
    for is_wanted, data, is_test in (
        (progress.do_valid, setup.valid_data, False),
        (progress.do_test, setup.test_data, True),
    ):
        if is_wanted and data is not None:
            state.features.renew(CurrentEvaluation)  # a signal ends it here: the next process repeats all of it
            prefix = f"iteration {progress.step} on {'test' if is_test else 'validation'} set"
            evaluate_and_print_results(
                state,
                prefix,
                forward_step_func,
                data,
                setup.model,
                state.cfg.model,
                verbose=state.prints_console_line,
                is_test=is_test,
                notify=notify,
            )


def is_evaluated_after_training(state: Run) -> bool:
    """Whether validation and test follow training; always true for a run that only evaluates."""
    validation = state.cfg.validation
    return validation.eval_after_training or validation.skip_train


def load_best_model(state: Run, model: list[nn.Module]) -> None:
    """With `checkpoint.load_best_model_at_end`, load the best checkpoint's weights, not its progress. Collective."""
    if state.cfg.checkpoint.load_best_model_at_end and state.checkpoints is not None and state.exits.decided is None:
        state.checkpoints.load_best_model(model)
