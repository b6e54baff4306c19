"""What one call of the Trainer works with: set up before it, taken apart after it."""

from __future__ import annotations

import atexit
import inspect
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from onstep.config import ConfigContainer, resolve
from onstep.config.lengths import train_iters
from onstep.distributed import World, data_parallel, open_world, world_size_from_environment
from onstep.errors import ConfigError
from onstep.events import Control
from onstep.trainer import loss_convention
from onstep.trainer.arguments import config_of, shown_arguments
from onstep.trainer.base_trainer import BaseTrainer, Collate
from onstep.trainer.checks import num_samples_of
from onstep.trainer.columns import ColumnFilter
from onstep.trainer.default_callbacks import attach_trackers
from onstep.trainer.labels import Labels, shifts_labels
from onstep.trainer.loading import collator, train_loader
from onstep.trainer.loss_convention import Convention
from onstep.trainer.model_step import ModelStep
from onstep.trainer.optimizers import make_optimizer, make_scheduler, show_made
from onstep.trainer.run_claim import claim_folder
from onstep.training.checkpointing import open_checkpoints
from onstep.training.exits import handled_signals
from onstep.training.fault_tolerance import monitored
from onstep.training.pretrain import record_end, say_changes
from onstep.training.run_folder import RunFolder
from onstep.training.scope import RunScope
from onstep.training.setup import count_steps, seed_everything
from onstep.training.state import GlobalState
from onstep.training.telling import Teller
from onstep.training.watchdog import watched

logger = logging.getLogger(__name__)


@dataclass
class Session:
    """Everything of one `train`, `evaluate` or `predict`."""

    state: GlobalState
    module: nn.Module
    """The user's module."""
    model: list[nn.Module]
    """The chunks that the loop trains: the module, wrapped where there are several ranks."""
    forward_step: ModelStep
    labels: Labels
    collate: Collate
    tell: Teller
    optimizer: Any = None
    scheduler: Any = None
    train_data: Any = None

    @property
    def saves_weights(self) -> bool:
        """Whether this rank writes the final weights to the run's folder."""
        state = self.state
        wanted = state.run_folder is not None and state.cfg.run.save_weights and state.world.is_main
        return wanted and not state.control.should_abort_without_save and state.exits.decided is None

    def release(self) -> None:
        """End worker processes and let go of the data-parallel wrapper."""
        if self.train_data is not None:
            self.train_data.close()
        self.model = self.tell.model = [self.module]


@contextmanager
def training_session(trainer: BaseTrainer, resume_from_checkpoint: Any = None) -> Iterator[Session]:
    """Set up the ranks, the run's folder, the model, optimizer, scheduler and data. Collective."""
    num_samples = num_samples_of(trainer.train_dataset)
    size = world_size_from_environment()
    config = config_of(trainer.args, num_samples=num_samples, world_size=size, for_training=True)
    if resume_from_checkpoint is False:
        config.checkpoint.resume = False
    elif isinstance(resume_from_checkpoint, (str, os.PathLike)):
        config.checkpoint.load, config.checkpoint.exit_on_missing_checkpoint = os.fspath(resume_from_checkpoint), True
    attach_trackers(trainer.callback_manager, config)
    with _world(config) as world:
        claim, lock = claim_folder(trainer, config, world)
        if claim is not None:
            config = resolve(claim.config, size)
            say_changes(claim, world)
        state = _state(trainer, config, world, None if claim is None else claim.folder)
        try:
            with handled_signals(state), watched(state), _session(trainer, state, seeds=True) as session:
                state.checkpoints = open_checkpoints(state, session.tell)
                try:
                    with monitored(state):
                        if state.checkpoints is not None:
                            state.checkpoints.find()
                        _build_training(trainer, session, num_samples)
                        session.tell("on_init_end")
                        yield session
                finally:
                    if state.checkpoints is not None:
                        state.checkpoints.close()
        finally:
            record_end(state)
            if lock is not None:
                lock.release()


@contextmanager
def evaluation_session(trainer: BaseTrainer) -> Iterator[Session]:
    """Set up what an evaluation takes; inside a run, for a callback that evaluates, what that run has. Collective."""
    if trainer.session is not None:
        yield trainer.session
        return
    size = world_size_from_environment()
    config = config_of(trainer.args, num_samples=None, world_size=size, for_training=False)
    attach_trackers(trainer.callback_manager, config)
    before = trainer.global_state
    with _world(config) as world:
        state = _state(trainer, config, world, None if before is None else before.run_folder)
        if before is None:
            count_steps(state, None)
        else:  # an evaluation shows the progress of the training before it
            state.train_state, state.facts = before.train_state, before.facts
        with watched(state), _session(trainer, state, seeds=trainer.model is None) as session:
            session.tell("on_init_end")
            yield session


@contextmanager
def _world(config: ConfigContainer) -> Iterator[World]:
    """The ranks. A group of one goes at once; one of several stays for the next call, until the process ends."""
    world = open_world(config.dist)
    try:
        yield world
    finally:
        if world.size == 1:
            world.close()
        elif world.owns_group:
            atexit.register(world.close)


@contextmanager
def _session(trainer: BaseTrainer, state: GlobalState, *, seeds: bool) -> Iterator[Session]:
    tell = Teller(trainer.callback_manager, state, [])
    trainer.global_state = state
    with RunScope(tell):
        if seeds:
            seed_everything(state.cfg.rng.seed)
        session = _build(trainer, state, tell)
        trainer.session = session
        try:
            yield session
        finally:
            trainer.session = None
            session.release()


def _state(trainer: BaseTrainer, config: ConfigContainer, world: World, folder: RunFolder | None) -> GlobalState:
    state = GlobalState(cfg=config, world=world, control=Control(rank=world.rank))
    state.trainer, state.processing_class = trainer, trainer.processing_class
    state.run_folder = folder
    state.given_args = shown_arguments(trainer.args, None if folder is None else str(folder.path))
    return state


def _build(trainer: BaseTrainer, state: GlobalState, tell: Teller) -> Session:
    if trainer.model is None:
        trainer.model = _made_by(trainer.model_init)
    module = trainer.model.to(state.world.device)
    tell.model = [module]
    state.flops_per_token = 6.0 * _non_embedding_parameters(module)
    labels = Labels(trainer.args.label_names, shifted=shifts_labels(module))
    return Session(
        state=state,
        module=module,
        model=[module],
        forward_step=_forward_step(trainer, module, labels, state),
        labels=labels,
        collate=collator(trainer, module),
        tell=tell,
    )


def _made_by(model_init: Any) -> nn.Module:
    """What `model_init` returns; one that takes an argument is given None, as there is no trial of a search."""
    parameters = inspect.signature(model_init).parameters.values()
    takes_trial = any(
        p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters
    )
    model: nn.Module = model_init(None) if takes_trial else model_init()
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model_init must return a torch.nn.Module, got {type(model).__name__}.")
    return model


def _forward_step(trainer: BaseTrainer, module: nn.Module, labels: Labels, state: GlobalState) -> ModelStep:
    weighting = state.cfg.train.loss_weighting
    convention, source = _convention(trainer, module)
    if weighting != "auto":
        convention = "mean"
    if state.world.is_main:
        gives = "a share of the step's loss" if convention == "share" else "means of micro-batches"
        weighed = "" if convention == "share" else f", weighted by {_unit(weighting)} (train.loss_weighting)"
        logger.info("loss: %s gives %s%s", source, gives, weighed)
    return ModelStep(trainer.compute_loss, labels, convention=convention, weighting=weighting, world=state.world)


def _unit(weighting: str) -> str:
    return "their labels where they have some, else by their samples" if weighting == "auto" else f"their {weighting}"


def _convention(trainer: BaseTrainer, module: nn.Module) -> tuple[Convention, str]:
    """What `compute_loss` gives, and whose code says so."""
    stated = trainer.loss_is_scaled_for_ga
    if stated is not None:
        return "share" if stated else "mean", "loss_is_scaled_for_ga"
    compute_loss = trainer.compute_loss
    is_overridden = getattr(compute_loss, "__func__", compute_loss) is not BaseTrainer.compute_loss
    if is_overridden and not loss_convention.hands_on(compute_loss):
        return loss_convention.of_function(compute_loss), "compute_loss"
    if trainer.compute_loss_func is not None:
        return loss_convention.of_function(trainer.compute_loss_func), "compute_loss_func"
    return loss_convention.of_model(module), type(module).__name__


def _build_training(trainer: BaseTrainer, session: Session, num_samples: int | None) -> None:
    state, config, tell = session.state, session.state.cfg, session.tell
    if isinstance(session.collate, ColumnFilter):
        session.collate.check(trainer.train_dataset)
    session.model = tell.model = data_parallel([session.module], state.world, config.ddp)
    session.optimizer = tell.optimizer = make_optimizer(trainer, session.module, config)
    iters = train_iters(config, num_samples, world_size=state.world.size)
    session.scheduler = tell.scheduler = make_scheduler(
        trainer, session.optimizer, config, iters, state.world.size, num_samples
    )
    show_made(trainer, session.optimizer, session.scheduler)
    if state.checkpoints is not None:
        state.checkpoints.load_progress(session.model, session.optimizer, session.scheduler)
    tell("on_data_init_start")
    session.train_data = train_loader(trainer.train_dataset, session.collate, config, state.world)
    state.train_dataloader = session.train_data
    state.train_state.do_train = True
    state.evaluates_last_step = config.validation.eval_after_training and not config.validation.eval_each_epoch
    count_steps(state, session.train_data)
    seed_everything(config.rng.seed + state.world.rank)


def _non_embedding_parameters(module: nn.Module) -> int:
    embeddings = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    return sum(p.numel() for p in module.parameters() if id(p) not in embeddings)
