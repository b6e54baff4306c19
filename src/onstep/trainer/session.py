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

from onstep.config import ConfigContainer
from onstep.config.lengths import train_iters
from onstep.distributed import World, data_parallel, open_world, world_size_from_environment
from onstep.errors import ConfigError
from onstep.events import Control
from onstep.models import Transformer
from onstep.sinks.reporting import attach_trackers
from onstep.trainer import loss_convention
from onstep.trainer.arguments import config_of, shown_arguments
from onstep.trainer.base_trainer import BaseTrainer, Collate
from onstep.trainer.checks import num_samples_of
from onstep.trainer.columns import ColumnFilter
from onstep.trainer.labels import Labels, shifts_labels
from onstep.trainer.loading import collator, train_loader
from onstep.trainer.loss_convention import Convention
from onstep.trainer.model_step import ModelStep
from onstep.trainer.optimizers import make_optimizer, make_scheduler, show_made
from onstep.trainer.run_claim import claim_folder
from onstep.training.bridge.global_state import GlobalState
from onstep.training.features import SETUP
from onstep.training.model_setup import idle_parameters
from onstep.training.opening import open_run
from onstep.training.run import Door
from onstep.training.run_folder import Claim
from onstep.training.run_lock import RunLock
from onstep.training.scope import Endings
from onstep.training.setup import DATA_TIMER, MODEL_TIMER, count_steps, end_set_up, load_checkpoint, seed_everything
from onstep.training.telling import Teller
from onstep.training.watchdog import Watching

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
    door = Door(trainer=trainer, processing_class=trainer.processing_class)

    def claim_run(config: ConfigContainer, world: World) -> tuple[Claim | None, RunLock | None]:
        claim, lock = claim_folder(trainer, config, world)
        door.given_args = shown_arguments(trainer.args, None if claim is None else str(claim.folder.path))
        return claim, lock

    with open_run(config, trainer.callback_manager, _world, claim_run, door, takes_finished=True) as opened:
        run = opened.run
        with _session(trainer, run, opened.tell, seeds=True) as session:
            _build_training(trainer, session, num_samples)
            end_set_up(run, session.tell)
            yield session


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
    folder = None if before is None else before.run_folder
    door = Door(trainer=trainer, processing_class=trainer.processing_class)
    door.given_args = shown_arguments(trainer.args, None if folder is None else str(folder.path))
    state = GlobalState(cfg=config, run_folder=folder, door=door)
    with state.features.open(SETUP, state, state.world), _world(config) as world:
        state.world, state.control = world, Control(rank=world.rank)
        door.tell = tell = Teller(trainer.callback_manager, state, [])
        if before is None:
            count_steps(state, None)
            state.trackers.join(trainer.callback_manager)
        else:  # an evaluation shows the progress of the training before it, and adds to its trackers
            state.train_state, state.facts, state.trackers = before.train_state, before.facts, before.trackers
        rows = (Watching, Endings)
        with state.features.open(rows, state, world), _session(trainer, state, tell, trainer.model is None) as session:
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
def _session(trainer: BaseTrainer, state: GlobalState, tell: Teller, seeds: bool) -> Iterator[Session]:
    trainer.global_state = state
    if seeds:
        seed_everything(state.cfg.rng.seed)
    session = _build(trainer, state, tell)
    trainer.session = session
    try:
        yield session
    finally:
        trainer.session = None
        session.release()


def _build(trainer: BaseTrainer, state: GlobalState, tell: Teller) -> Session:
    with state.timers(MODEL_TIMER).measure():
        if trainer.model is None:
            trainer.model = _made_by(trainer.model_init)
        module = trainer.model.to(state.world.device)
    tell.model = [module]
    state.sums.flops_per_token = 6.0 * _active_parameters(module)
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
    with state.timers(MODEL_TIMER).measure(barrier=True):
        session.model = tell.model = data_parallel([session.module], state.world, config.ddp)
        session.optimizer = tell.optimizer = make_optimizer(trainer, session.module, config)
        iters = train_iters(config, num_samples, world_size=state.world.size)
        session.scheduler = tell.scheduler = make_scheduler(
            trainer, session.optimizer, config, iters, state.world.size, num_samples
        )
    show_made(trainer, session.optimizer, session.scheduler)
    load_checkpoint(state, tell)
    tell("on_data_init_start")
    with state.timers(DATA_TIMER).measure(barrier=True):
        session.train_data = train_loader(trainer.train_dataset, session.collate, config, state.world)
    state.door.train_dataloader = session.train_data
    state.train_state.do_train = True
    state.train_state.do_valid = trainer.eval_dataset is not None and config.validation.eval_iters != 0
    state.door.evaluates_last_step = config.validation.eval_after_training and not config.validation.eval_each_epoch
    count_steps(state, session.train_data)
    seed_everything(config.rng.seed + state.world.rank)


def _active_parameters(module: nn.Module) -> int:
    """Parameters that a token meets, outside of embeddings."""
    embeddings = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    total = sum(p.numel() for p in module.parameters() if id(p) not in embeddings)
    return total - idle_parameters(module.config) if isinstance(module, Transformer) else total
