"""Builds what one call of the Trainer works with, and takes it apart again."""

from __future__ import annotations

import atexit
import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from onstep.config import ConfigContainer, args_to_config, resolve
from onstep.config.lengths import train_iters
from onstep.distributed import World, data_parallel, open_world, world_size_from_environment
from onstep.errors import RunExistsError
from onstep.events import Control, TrainerCallback
from onstep.optim import TorchSchedulerAdapter, TrainingOptimizer, build_optimizer, wrap_optimizer
from onstep.trainer import loss_convention
from onstep.trainer.loading import is_map_style, train_loader
from onstep.trainer.model_step import ModelStep
from onstep.training.best_metric import note_best_metric
from onstep.training.pretrain import claim_for_all
from onstep.training.run_folder import RunFolder, Status
from onstep.training.setup import count_steps, scheduler_for, seed_everything
from onstep.training.state import GlobalState
from onstep.training.telling import Teller

if TYPE_CHECKING:
    from onstep.trainer.trainer import Trainer

logger = logging.getLogger(__name__)


@dataclass
class Preparation:
    """Everything of one `train`, `evaluate` or `predict`."""

    state: GlobalState
    module: nn.Module
    """The user's module."""
    model: list[nn.Module]
    """The chunks that the loop trains: the module, wrapped where there are several ranks."""
    forward_step: ModelStep
    tell: Teller
    optimizer: Any = None
    scheduler: Any = None
    train_data: Any = None

    @property
    def saves_weights(self) -> bool:
        """Whether the final weights go to the run's folder."""
        return self.state.run_folder is not None and self.state.cfg.run.save_weights

    def release(self) -> None:
        """End worker processes and let go of the data-parallel wrapper."""
        if self.train_data is not None:
            self.train_data.close()
        self.model = self.tell.model = [self.module]

    def note_metrics(self, metrics: dict[str, Any]) -> None:
        """Follow the metric that tells the best model."""
        note_best_metric(self.state, metrics)

    def mean_loss(self) -> float:
        """Mean of the losses of all logged steps; NaN where none was logged."""
        return self.state.mean_loss()


@contextmanager
def prepare(trainer: Trainer, *, for_training: bool) -> Iterator[Preparation]:
    """Set up the ranks, the state, the model and, for training, optimizer and data. Collective."""
    if trainer.global_state is not None and trainer.global_state.in_run:
        yield _within(trainer, trainer.global_state)
        return
    world = _open(trainer)
    try:
        run = _build(trainer, world, for_training)
        status: Status = "failed"
        try:
            yield run
            status = "stopped" if run.state.was_stopped else "completed"
        finally:
            run.release()
            if for_training and run.state.run_folder is not None and world.is_main:
                run.state.run_folder.finish(status, run.state.train_state.step)
    finally:
        _close(world)


def _open(trainer: Trainer) -> World:
    config = args_to_config(trainer.args, world_size=world_size_from_environment())
    return open_world(config.dist)


def _close(world: World) -> None:
    """A group of one goes at once; one of several ranks stays for the next call, until the process ends."""
    if world.size == 1:
        world.close()
    elif world.owns_group:
        atexit.register(world.close)


def _within(trainer: Trainer, state: GlobalState) -> Preparation:
    """What a callback that calls `trainer.evaluate()` in the middle of a run works with."""
    run = trainer.active_run
    assert run is not None
    assert run.state is state
    return run


def _build(trainer: Trainer, world: World, for_training: bool) -> Preparation:
    num_samples = None
    if for_training and is_map_style(trainer.train_dataset):
        num_samples = len(trainer.train_dataset)
    config = resolve(args_to_config(trainer.args, num_samples_per_epoch=num_samples, world_size=world.size), world.size)
    state = _state(trainer, config, world, for_training)
    if for_training or trainer.model is None:
        seed_everything(config.rng.seed)
    module = _module(trainer).to(world.device)
    forward_step = _forward_step(trainer, module, state)
    state.flops_per_token = 6.0 * _non_embedding_parameters(module)
    tell = Teller(trainer.callback_manager, state, [module])
    run = Preparation(state, module, [module], forward_step, tell)
    if for_training:
        trainer.global_state, trainer.active_run = state, run
        _build_training(trainer, run, num_samples)
        return run
    if trainer.global_state is None:
        count_steps(state, None)
    trainer.global_state, trainer.active_run = state, run
    return run


def _state(trainer: Trainer, config: ConfigContainer, world: World, for_training: bool) -> GlobalState:
    state = GlobalState(cfg=config, world=world, control=Control(rank=world.rank))
    state.trainer, state.processing_class = trainer, trainer.processing_class
    if for_training:
        state.run_folder = _claim(trainer, config, world)
    elif trainer.global_state is not None:  # an evaluation shows the progress of the training before it
        state.train_state = trainer.global_state.train_state
        state.facts = trainer.global_state.facts
        state.run_folder = trainer.global_state.run_folder
    state.given_args = _shown_args(trainer.args, state.run_folder)
    return state


def _shown_args(args: Any, folder: RunFolder | None) -> Any:
    """The user's arguments as callbacks see them: with the folder that the run really has, where journals go too."""
    shown = copy.copy(args)
    if folder is not None:
        shown.output_dir = str(folder.path)
    if getattr(shown, "logging_dir", None) is None:
        shown.logging_dir = shown.output_dir
    return shown


def _claim(trainer: Trainer, config: ConfigContainer, world: World) -> RunFolder | None:
    if config.run.name is None:
        return None
    path = Path(config.run.output_dir) / config.run.name
    if trainer.owned_folder is not None:
        return RunFolder(trainer.owned_folder)
    claim = claim_for_all(config, world)
    assert claim is not None
    if claim.is_finished:
        raise RunExistsError(
            f"{path} holds a completed run of the same arguments. Nothing was touched; pass another output_dir, or "
            f"config_overrides={{'run.fresh': True}} to start {path.name}-2 beside it."
        )
    trainer.owned_folder = claim.folder.path
    return claim.folder


def _module(trainer: Trainer) -> nn.Module:
    if trainer.model is None:
        assert trainer.model_init is not None
        trainer.model = trainer.model_init()
    return trainer.model


def _forward_step(trainer: Trainer, module: nn.Module, state: GlobalState) -> ModelStep:
    from onstep.trainer.trainer import Trainer as Base

    convention = loss_convention.of_model(module)
    source = f"{type(module).__name__}"
    if type(trainer).compute_loss is not Base.compute_loss:
        convention, source = loss_convention.of_function(trainer.compute_loss), "compute_loss"
    elif trainer.compute_loss_func is not None:
        convention, source = loss_convention.of_function(trainer.compute_loss_func), "compute_loss_func"
    weighting = state.cfg.train.loss_weighting
    if state.world.is_main:
        logger.info(
            "loss: %s gives a %s; train.loss_weighting=%s",
            source,
            "share of the step's loss" if convention == "share" else "mean, weighted by labels where known",
            weighting,
        )
    return ModelStep(
        trainer.compute_loss,
        convention=convention,
        causal=loss_convention.is_causal(module),
        weighting=weighting,
        world=state.world,
    )


def _build_training(trainer: Trainer, run: Preparation, num_samples: int | None) -> None:
    state, config = run.state, run.state.cfg
    run.tell("on_data_init_start")
    run.train_data = train_loader(trainer, state, run.module)
    iters = config.train.train_iters = train_iters(config, num_samples)
    run.model = data_parallel([run.module], state.world, config.ddp)
    run.optimizer = _optimizer(trainer, run.module, config)
    run.scheduler = _scheduler(trainer, run.optimizer, config, iters)
    state.train_dataloader = run.train_data
    state.train_state.do_train = True
    count_steps(state, run.train_data)
    seed_everything(config.rng.seed + state.world.rank)
    run.tell.model, run.tell.optimizer, run.tell.scheduler = run.model, run.optimizer, run.scheduler


def _optimizer(trainer: Trainer, module: nn.Module, config: ConfigContainer) -> Any:
    given = trainer.optimizer
    if trainer.optimizer_cls_and_kwargs is not None:
        cls, kwargs = trainer.optimizer_cls_and_kwargs
        given = cls([p for p in module.parameters() if p.requires_grad], **kwargs)
    elif isinstance(given, type) or (callable(given) and not hasattr(given, "step")):
        given = given([p for p in module.parameters() if p.requires_grad])
    if given is None:
        return build_optimizer([module], config.optimizer)
    return wrap_optimizer(given, config.optimizer.clip_grad)


def _scheduler(trainer: Trainer, optimizer: Any, config: ConfigContainer, iters: int | None) -> Any:
    given = trainer.lr_scheduler
    torch_optimizer = optimizer.optimizer if isinstance(optimizer, TrainingOptimizer) else optimizer
    if (given is not None and not hasattr(given, "step")) or isinstance(given, type):
        given = given(torch_optimizer)
    if isinstance(given, TrainerCallback):
        trainer.callback_manager.add(given)
    if given is not None:
        return TorchSchedulerAdapter(given)
    if trainer.optimizer is not None or trainer.optimizer_cls_and_kwargs is not None:
        for group in optimizer.param_groups:  # the schedule scales the user's own rates and keeps their decay
            group.setdefault("max_lr", float(group["lr"]))
            decay = float(group.get("weight_decay", 0.0))
            group.setdefault("start_wd", decay)
            group.setdefault("end_wd", decay)
    return scheduler_for(config, optimizer, iters)


def _non_embedding_parameters(module: nn.Module) -> int:
    embeddings = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    return sum(p.numel() for p in module.parameters() if id(p) not in embeddings)
