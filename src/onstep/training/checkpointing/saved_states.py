"""Collects the states that a run saves in its checkpoints: its components, and those of loop and data."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from onstep.checkpoint import ModelState, RngState, SharingPattern, StateComponent, Stateful, check_encodable
from onstep.checkpoint.components import make_durable
from onstep.config import CheckpointConfig
from onstep.data import StepSource
from onstep.distributed.buffered import buffered_chunks
from onstep.distributed.pipeline.seats import is_staged
from onstep.distributed.shards import is_sharded
from onstep.errors import CheckpointError
from onstep.events import Dispatcher
from onstep.events.context import unwrap
from onstep.optim import OptimizerParamScheduler
from onstep.training.checkpointing.callback_states import CallbackStates
from onstep.training.checkpointing.optimizer_state import OptimizerState
from onstep.training.checkpointing.other_weights import OtherWeights, other_weights
from onstep.training.checkpointing.over_stages import ModelOverStages, OptimizerOverStages
from onstep.training.checkpointing.run_progress import RunProgress
from onstep.training.protocols import Metrics, StateDict, Trained, UserScheduler, has_state
from onstep.training.run import Run

logger = logging.getLogger(__name__)

COMPONENTS = ("model", "optimizer", "scheduler", "trainer", "dataset", "rng", "callbacks")
"""The groups that `checkpoint.components` selects from."""

_LESS = ("components", "save_optim")
"""The settings that leave components out of checkpoints."""

_OF_TRAINER = ("loop", "rank")
"""The states in `trainer`: those of the loop between steps, common to all ranks and per rank."""


def callbacks_give_weights(config: CheckpointConfig, notify: Dispatcher) -> bool:
    """Whether checkpoints have no weights, and a callback gives the model its own (`on_load_model_weights`)."""
    has_weights = config.components is None or "model" in config.components
    return not has_weights and notify.listens("on_load_model_weights")


class RunComponents:
    """The components of a run, for saving and for loading, and the ranks on which each of them differs."""

    def __init__(self, state: Run, notify: Dispatcher) -> None:
        self.state = state
        self.notify = notify
        restores_arguments = bool(state.cfg.trainer.get("restore_callback_states_from_checkpoint"))
        self.callbacks = CallbackStates(notify.manager, restores_arguments=restores_arguments)
        self.rng = RngState(state.world.device)

    def progress(self, trained: Trained, loads: bool = False) -> list[StateComponent]:
        """The components that are loaded before data is opened."""
        config = self.state.cfg.checkpoint
        is_required = loads or config.components is None

        staged, world = is_staged(trained.model), self.state.world
        weights = ModelOverStages(trained.model, world) if staged else ModelState(trained.model)
        pattern, validates = pattern_of(weights), config.validate_replication

        def compared(key: str, part: Stateful) -> StateComponent:
            return StateComponent(key, part, pattern, required=is_required, validate_replication=validates)

        model = compared("model", weights)
        run_dir = self.state.run_dir
        model.at_root = run_dir is not None and run_dir.layout == "hugging_face"
        parts = [] if loads and callbacks_give_weights(config, self.notify) else [model]
        has_optimizer = (config.load_optim or not self._is_chosen_start) if loads else config.save_optim
        if trained.optimizer is not None and has_optimizer:
            of_optimizer = OptimizerState(trained.optimizer, trained.model)
            if staged:
                of_optimizer = OptimizerOverStages(trained.optimizer, trained.model, world)
            part = compared("optimizer", of_optimizer)
            if buffered_chunks(trained.model):
                part.sharing_pattern = SharingPattern.SHARDED
            parts.append(part)
            if trained.scheduler is not None:
                parts.append(self.scheduler(trained.scheduler))
        if others := other_weights(trained.model, trained.optimizer):
            are_parts = all(is_sharded([one]) for one in others)
            of_others = SharingPattern.SHARDED if are_parts else SharingPattern.PER_RANK
            parts.append(StateComponent("other_weights", OtherWeights(others), of_others, required=False))
        parts.append(_replicated("trainer", RunProgress(self.state), required=is_required))
        return [*parts, _of_the_rank("callbacks", self.callbacks), *self._of_the_user(trained)]

    @property
    def _is_chosen_start(self) -> bool:
        return self.state.checkpoints is not None and self.state.checkpoints.is_chosen_start

    def features(self) -> list[StateComponent]:
        """The states of the loop and its features between steps, loaded when training begins."""
        features = self.state.features
        parts = [_replicated("loop", FeatureStates(features.states(per_rank=False)))]
        own = features.states(per_rank=True)
        return [*parts, _of_the_rank("rank", FeatureStates(own))] if own else parts

    def position(self, data: DataPosition | None, loads: bool = False) -> list[StateComponent]:
        """The components that are loaded right before the first step; `data` is None if the data stays where it is."""
        config = self.state.cfg.checkpoint
        of_the_data = _replicated if data is not None and data.is_shared else _of_the_rank
        parts = [] if data is None else [of_the_data("dataset", data)]
        if (config.load_rng or not self._is_chosen_start) if loads else config.save_rng:
            parts.append(_of_the_rank("rng", self.rng))
        return parts

    def selected(self, components: list[StateComponent]) -> list[StateComponent]:
        """The components to save, by `checkpoint.components`; the user's own are always included.

        A checkpoint without a state that the run has would lose it, so one that cannot be collected fails the save.
        """
        own, wanted = (*COMPONENTS, *_OF_TRAINER), self.state.cfg.checkpoint.components
        keep = own if wanted is None else {*wanted, *(_OF_TRAINER if "trainer" in wanted else ())}
        chosen = [one for one in components if one.key in keep or one.key not in own]
        return [replace(one, required=one.required or one.key in (*own, "forward_step")) for one in chosen]

    def scheduler(self, scheduler: UserScheduler) -> StateComponent:
        """The position of the schedule."""
        return _replicated("scheduler", SchedulerPosition(scheduler))

    def check_states(self, trained: Trained) -> None:
        """See `RunCheckpoints.check_states`."""
        config, optimizer = self.state.cfg.checkpoint, trained.optimizer
        if config.save_optim and optimizer is not None and not has_state(optimizer):
            raise CheckpointError(
                f"the optimizer {type(optimizer).__name__} has no state_dict and load_state_dict, so no checkpoint can "
                f"hold it; implement both, or set checkpoint.save_optim=false."
            )
        if config.components is None or "callbacks" in config.components:
            check_encodable(self.callbacks.state_dict(), "callbacks")
        if trained.scheduler is not None and config.save_optim:
            check_encodable(SchedulerPosition(trained.scheduler).state_dict(), "scheduler")
        saved = {one.key for one in self.selected(self.progress(trained))}
        lacking = [one.key for one in self.progress(trained, loads=True) if one.required and one.key not in saved]
        if lacking and config.resume and self.state.world.is_main:
            settings = ", ".join(
                f"checkpoint.{name}={value}" for name, value in config.changed().items() if name in _LESS
            )
            logger.warning(
                "if this run is interrupted, it cannot continue from its checkpoints: they have no %s (%s)",
                ", ".join(lacking),
                settings,
            )

    def _of_the_user(self, trained: Trained) -> list[StateComponent]:
        """The user's components: a forward step with a state, and the `state_components()` of callbacks.

        That method gets the model if it has a parameter `model`.
        """
        forward_step = self.state.entry_point.forward_step_func
        parts = [_of_the_rank("forward_step", forward_step)] if has_state(forward_step) else []
        for callback in self.notify.manager.callbacks if self.notify.manager is not None else []:
            of_callback = getattr(callback, "state_components", None)
            if callable(of_callback):
                takes_model = "model" in inspect.signature(of_callback).parameters
                parts += of_callback(model=unwrap(trained.model[0])) if takes_model else of_callback()
        return parts


def _replicated(key: str, part: Stateful, *, required: bool = False, **options: Any) -> StateComponent:
    return StateComponent(key, part, SharingPattern.REPLICATED, required=required, **options)


def _of_the_rank(key: str, part: Stateful) -> StateComponent:
    return StateComponent(key, part, SharingPattern.PER_RANK, required=False)


class FeatureStates:
    """The loop's own state between steps, by name: the log interval, the anomaly gate, ..."""

    def __init__(self, parts: Mapping[str, Stateful]) -> None:
        self._parts = parts

    def state_dict(self) -> StateDict:
        """The states by name."""
        return {name: part.state_dict() for name, part in self._parts.items()}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restore the saved states; one that the checkpoint does not contain starts from scratch."""
        for name, part in self._parts.items():
            if name in state_dict:
                part.load_state_dict(state_dict[name])

    def make_durable(self) -> None:
        """Fsync the files that the states refer to."""
        for part in self._parts.values():
            make_durable(part)


class SchedulerPosition:
    """A scheduler's position and, for Onstep's, whether its schedule is the saved one: see its `load_state_dict`."""

    def __init__(self, scheduler: UserScheduler) -> None:
        self._scheduler = scheduler

    def state_dict(self) -> StateDict:
        """The scheduler's own state."""
        return self._scheduler.state_dict()

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue at the saved count.

        Raises:
            ConfigError: Onstep's own has another schedule, and nothing determines which of the two applies.
        """
        if isinstance(self._scheduler, OptimizerParamScheduler):
            self._scheduler.num_steps = 0  # to which the saved count is added
        self._scheduler.load_state_dict(state_dict)


class DataPosition:
    """The position of this rank's reader: (epoch, samples read), and the state of a stateful iterable."""

    def __init__(self, reader: StepSource, state: Run) -> None:
        self._reader = reader
        self._state = state
        self.is_loaded = False
        self.is_shared = reader.position_is_shared
        """Whether it is the same on all ranks, and any number of them can continue from it."""

    def state_dict(self) -> StateDict:
        """The reader's position after the data that was handed out."""
        return self._reader.state_dict()

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue at that position."""
        self._reader.load_state_dict(state_dict)
        self.is_loaded = True

    def seek(self) -> None:
        """Move to the position recorded in the progress, which is the same for any number of ranks.

        A raw iterator stays where its own state put it: it cannot seek.
        """
        if self.is_loaded and not self._reader.has_epochs:
            return
        progress = self._state.train_state
        self._reader.seek(progress.epoch, progress.samples_in_epoch)


def pattern_of(weights: ModelState) -> SharingPattern:
    """How ranks share a model and what belongs to it: whole on each of them, or in shards."""
    return SharingPattern.SHARDED if weights.is_sharded else SharingPattern.REPLICATED


def finite_numbers(metrics: Metrics) -> dict[str, float]:
    """The metrics that are numbers, as stored in a manifest; NaN and infinity cannot be ordered."""
    numbers = {key: value for key, value in metrics.items() if isinstance(value, (int, float))}
    return {key: float(value) for key, value in numbers.items() if math.isfinite(value)}
