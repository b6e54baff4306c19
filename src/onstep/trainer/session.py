"""Sets up one call of the Trainer, and tears it down afterwards."""

from __future__ import annotations

import atexit
import inspect
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import NoneType
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from onstep.config import ConfigContainer
from onstep.config.checks import idle_in_trainer, idle_line
from onstep.config.hf.checks import idle_arguments
from onstep.config.lengths import train_iters
from onstep.distributed import World, data_parallel, open_world, world_size_from_environment
from onstep.errors import ConfigError, DataError
from onstep.events import Control, Dispatcher
from onstep.models import Transformer
from onstep.models.generation.generate import inner_transformer
from onstep.trackers.report_to import attach_trackers
from onstep.trainer import loss_convention
from onstep.trainer.base_trainer import BaseTrainer, Collate
from onstep.trainer.dataloaders import ColumnFilter, collator, num_samples_of, train_loader
from onstep.trainer.directories import acquire_dir
from onstep.trainer.loss_convention import Convention, Labels, shifts_labels
from onstep.trainer.methods import TrainerMethods
from onstep.trainer.methods.callbacks import adopt_state, shown_steps
from onstep.trainer.model_step import ModelStep
from onstep.trainer.optimizers import (
    check_optimizers,
    expose_optimizers,
    known_optimizers,
    make_optimizer,
    make_scheduler,
    withdraw_optimizers,
)
from onstep.trainer.own_arguments import config_of, shown_arguments
from onstep.training.bridge.global_state import GlobalState
from onstep.training.features import SETUP
from onstep.training.lifecycle.endings import Endings
from onstep.training.opening import open_run
from onstep.training.run import EntryPoint
from onstep.training.runs.run_dir import Claim, RunLock
from onstep.training.setup.model_and_data import idle_parameters
from onstep.training.setup.setup import (
    DATA_TIMER,
    MODEL_TIMER,
    count_steps,
    end_set_up,
    load_checkpoint,
    seed_everything,
)
from onstep.training.watchdog.watchdog import Watching

logger = logging.getLogger(__name__)


@dataclass
class Session:
    """The objects of one `train`, `evaluate` or `predict` call."""

    state: GlobalState
    module: nn.Module
    """The user's module."""
    model: list[nn.Module]
    """The chunks that the loop trains: the module, wrapped if there are several ranks."""
    forward_step: ModelStep
    labels: Labels
    collate: Collate
    notify: Dispatcher
    optimizer: Any = None
    scheduler: Any = None
    train_data: Any = None

    def release(self) -> None:
        """End worker processes and release the data-parallel wrapper."""
        if self.train_data is not None:
            self.train_data.close()
        self.model = self.notify.model = [self.module]


def check_training(trainer: TrainerMethods, resume_from_checkpoint: Any = None) -> None:
    """Reject (ConfigError, DataError) a `train()` that lacks something; the message names it."""
    args, dataset = trainer.args, trainer.train_dataset
    if trainer.session is not None:
        raise ConfigError("This Trainer is already training or evaluating; a callback may evaluate, but not train.")
    if dataset is None:
        raise ConfigError("Trainer.train requires a train_dataset; pass one to the constructor.")
    if not isinstance(resume_from_checkpoint, (bool, str, os.PathLike, NoneType)):
        raise ConfigError(
            f"resume_from_checkpoint={resume_from_checkpoint!r} must be the path of a checkpoint, True or None (the "
            f"run's newest, if any), or False (do not continue)."
        )
    num_samples = num_samples_of(dataset)
    if num_samples is None and args.max_steps <= 0:
        raise ConfigError("The train_dataset has no length, so num_train_epochs cannot end the run; set max_steps.")
    if num_samples == 0:
        raise DataError("The train_dataset is empty: it has 0 samples.")
    if isinstance(dataset, DataLoader) and dataset.batch_size not in (None, args.per_device_train_batch_size):
        raise ConfigError(
            f"The train_dataset is a DataLoader with batch_size={dataset.batch_size}, and per_device_train_batch_size="
            f"{args.per_device_train_batch_size} gives the run its length and schedule; make them the same."
        )
    asked = {"eval_on_start=True": args.eval_on_start, "eval_on_save=True": args.eval_on_save}
    asked = {f"eval_strategy={args.eval_strategy!r}": args.eval_strategy != "no", **asked}
    if trainer.eval_dataset is None and any(asked.values()):
        name = next(name for name, value in asked.items() if value)
        raise ConfigError(f"{name} requires an eval_dataset; pass one to the constructor.")
    withdraw_optimizers(trainer)
    check_optimizers(trainer)


@contextmanager
def training_session(trainer: TrainerMethods, resume_from_checkpoint: Any = None) -> Iterator[Session]:
    """Set up the ranks, the run's directory, the model, optimizer, scheduler and data. Collective."""
    num_samples = num_samples_of(trainer.train_dataset)
    size = world_size_from_environment()
    config = config_of(trainer.args, num_samples=num_samples, world_size=size, for_training=True)
    if resume_from_checkpoint is False:
        config.checkpoint.resume = False
    elif isinstance(resume_from_checkpoint, (str, os.PathLike)):
        config.checkpoint.load, config.checkpoint.exit_on_missing_checkpoint = os.fspath(resume_from_checkpoint), True
    entry_point = EntryPoint(trainer=trainer, processing_class=trainer.processing_class)

    def claim_run(config: ConfigContainer, world: World) -> tuple[Claim | None, RunLock | None]:
        claim, lock = acquire_dir(trainer, config, world)
        entry_point.given_args = shown_arguments(trainer.args, None if claim is None else str(claim.directory.path))
        return claim, lock

    with open_run(config, trainer.callback_manager, _world, claim_run, entry_point, accepts_finished=True) as opened:
        run = opened.run
        with _session(trainer, run, opened.notify, seeds=True) as session:
            _build_training(trainer, session, num_samples)
            end_set_up(run, session.notify)
            yield session


@contextmanager
def evaluation_session(trainer: TrainerMethods) -> Iterator[Session]:
    """Set up an evaluation; inside a run, for a callback that evaluates, reuse that run's objects. Collective."""
    if trainer.session is not None:
        yield trainer.session
        return
    size = world_size_from_environment()
    config = config_of(trainer.args, num_samples=None, world_size=size, for_training=False)
    attach_trackers(trainer.callback_manager, config)
    before = trainer.global_state
    directory = None if before is None else before.run_dir
    entry_point = EntryPoint(trainer=trainer, processing_class=trainer.processing_class)
    entry_point.given_args = shown_arguments(trainer.args, None if directory is None else str(directory.path))
    state = GlobalState(cfg=config, run_dir=directory, entry_point=entry_point)
    with state.features.open(SETUP, state, state.world), _world(config) as world:
        state.world, state.control = world, Control(rank=world.rank)
        notify = Dispatcher(trainer.callback_manager, state, [], *known_optimizers(trainer))
        entry_point.fire = notify.fire
        if before is None:
            count_steps(state, None)
            state.bridge_trackers.join(trainer.callback_manager)
        else:  # an evaluation shows the progress of the preceding training, and adds to its trackers
            entry_point.train_dataloader = before.entry_point.train_dataloader
            state.train_state, state.info, state.bridge_trackers = (
                before.train_state,
                before.info,
                before.bridge_trackers,
            )
        adopt_state(trainer.given_state, state)
        rows = (Watching, Endings)
        with (
            state.features.open(rows, state, world),
            _session(trainer, state, notify, trainer.model is None) as session,
        ):
            session.notify.on_init_end()
            yield session


@contextmanager
def _world(config: ConfigContainer) -> Iterator[World]:
    """The ranks. A group of one is closed at once; one of several is kept for the next call, until the process ends."""
    world = open_world(config.dist)
    try:
        yield world
    finally:
        if world.size == 1:
            world.close()
        elif world.owns_group:
            atexit.register(world.close)


@contextmanager
def _session(trainer: TrainerMethods, state: GlobalState, notify: Dispatcher, seeds: bool) -> Iterator[Session]:
    trainer.global_state, trainer.given_state = state, None
    if seeds:
        seed_everything(state.cfg.rng.seed)
    with state.timers(MODEL_TIMER).measure():
        if trainer.model is None:
            trainer.model = _build_model(trainer.model_init)
        stays = trainer.args.place_model_on_device is False
        module = trainer.model if stays else trainer.model.to(state.world.device)
    notify.model = [module]
    state.sums.flops_per_token = 6.0 * _active_parameters(module)
    labels = Labels(trainer.args.label_names, shifted=shifts_labels(module))
    forward_step = _forward_step(trainer, module, labels, state)
    session = Session(state, module, [module], forward_step, labels, collator(trainer, module), notify)
    trainer.session = session
    try:
        yield session
    finally:
        trainer.session = None
        session.release()


def _build_model(model_init: Any) -> nn.Module:
    """The result of `model_init`; if it has a parameter, None is passed, since no hyperparameter search is running."""
    parameters = inspect.signature(model_init).parameters.values()
    accepts_trial = any(
        p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters
    )
    model: nn.Module = model_init(None) if accepts_trial else model_init()
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model_init must return a torch.nn.Module, got {type(model).__name__}.")
    return model


def _forward_step(trainer: TrainerMethods, module: nn.Module, labels: Labels, state: GlobalState) -> ModelStep:
    weighting = state.cfg.train.loss_weighting
    convention, source = _convention(trainer, module)
    if weighting != "auto":
        convention = "mean"
    if state.world.is_main:
        unit = "labels if they have any, else by their samples" if weighting == "auto" else weighting
        means = f"means of micro-batches, weighted by their {unit} (train.loss_weighting)"
        logger.info("loss: %s returns %s", source, "a share of the step's loss" if convention == "share" else means)
    return ModelStep(trainer.compute_loss, labels, convention=convention, weighting=weighting, world=state.world)


def _convention(trainer: TrainerMethods, module: nn.Module) -> tuple[Convention, str]:
    """The kind of loss that `compute_loss` returns, and whose code determines it."""
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


def _build_training(trainer: TrainerMethods, session: Session, num_samples: int | None) -> None:
    state, config, notify = session.state, session.state.cfg, session.notify
    if state.world.is_main:
        _name_idle_arguments(trainer, session)
    if isinstance(session.collate, ColumnFilter):
        session.collate.check(trainer.train_dataset)
    with state.timers(MODEL_TIMER).measure(barrier=True):
        session.model = notify.model = data_parallel([session.module], state.world, config.ddp)
        session.optimizer = notify.optimizer = make_optimizer(trainer, session.module, config)
        iters = train_iters(config, num_samples, world_size=state.world.size)
        session.scheduler = notify.scheduler = make_scheduler(
            trainer, session.optimizer, config, iters, state.world.size, num_samples
        )
    expose_optimizers(trainer, session.optimizer, session.scheduler)
    load_checkpoint(state, notify)
    notify.on_data_init_start()
    with state.timers(DATA_TIMER).measure(barrier=True):
        session.train_data = train_loader(trainer.train_dataset, session.collate, config, state.world)
    state.entry_point.train_dataloader = session.train_data
    state.train_state.do_train = True
    state.train_state.do_valid = trainer.eval_dataset is not None and config.validation.eval_iters != 0
    state.entry_point.evaluates_last_step = (
        config.validation.eval_after_training and not config.validation.eval_each_epoch
    )
    count_steps(state, session.train_data)
    state.info.shown_steps = shown_steps(trainer.args, state.info.max_steps)
    seed_everything(config.rng.seed + state.world.rank)


def _name_idle_arguments(trainer: TrainerMethods, session: Session) -> None:
    """Say in one line which arguments have no effect in this training."""
    transformer = inner_transformer(session.module)
    found = idle_in_trainer(session.state.cfg, None if transformer is None else transformer.config)
    if isinstance(trainer.train_dataset, DataLoader) and trainer.data_collator is not None:
        found.append(("a train_dataset that is not a DataLoader, which has its own", ["data_collator"]))
    if trainer.args.prediction_loss_only and trainer.compute_metrics is not None:
        found.append(("prediction_loss_only=False", ["compute_metrics"]))
    line = idle_line([*idle_arguments(trainer.args), *found])
    if line is not None:
        logger.warning("%s", line)


def _active_parameters(module: nn.Module) -> int:
    """Number of parameters that a token uses, outside of embeddings."""
    embeddings = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    total = sum(p.numel() for p in module.parameters() if id(p) not in embeddings)
    return total - idle_parameters(module.config) if isinstance(module, Transformer) else total
