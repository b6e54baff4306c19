"""Collects the states that a run saves in its checkpoints: its components, and those of loop, data and callbacks."""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from onstep.checkpoint import ModelState, RngState, SharingPattern, StateComponent, Stateful, check_encodable
from onstep.checkpoint.components import make_durable
from onstep.data import StepSource
from onstep.errors import CheckpointError, text_of
from onstep.events import CallbackManager, Dispatcher
from onstep.events.exportable_state import is_exportable
from onstep.optim import OptimizerParamScheduler
from onstep.optim.protocol import HasState
from onstep.processes.heartbeat import HEARTBEAT
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


_PLAIN = (str, int, float, bool, type(None))
_DIGEST = re.compile("[0-9a-f]{8}")


class RunComponents:
    """The components of a run, for saving and for loading, and the ranks on which each of them differs."""

    def __init__(self, state: Run, notify: Dispatcher) -> None:
        self.state = state
        self.notify = notify
        self.callbacks = CallbackStates(notify.manager)
        self.rng = RngState(state.world.device)

    def progress(self, trained: Trained, loads: bool = False) -> list[StateComponent]:
        """The components that are loaded before data is opened."""
        config = self.state.cfg.checkpoint
        is_required = loads or config.components is None

        def compared(key: str, part: Stateful) -> StateComponent:
            return _replicated(key, part, required=is_required, validate_replication=config.validate_replication)

        parts = [compared("model", ModelState(trained.model))]
        run_dir = self.state.run_dir
        parts[0].at_root = run_dir is not None and run_dir.layout == "hugging_face"
        has_optimizer = (config.load_optim or not self._is_chosen_start) if loads else config.save_optim
        if trained.optimizer is not None and has_optimizer:
            parts.append(compared("optimizer", trained.optimizer))
            if trained.scheduler is not None:
                parts.append(self.scheduler(trained.scheduler))
        parts.append(_replicated("trainer", RunProgress(self.state), required=is_required))
        return [*parts, _of_the_rank("callbacks", self.callbacks), *self._of_the_user()]

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
        parts = [] if data is None else [_of_the_rank("dataset", data)]
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

    def _of_the_user(self) -> list[StateComponent]:
        """The user's components: a forward step with a state, and the `state_components()` of callbacks."""
        forward_step = self.state.entry_point.forward_step_func
        parts = [_of_the_rank("forward_step", forward_step)] if has_state(forward_step) else []
        for callback in self.notify.manager.callbacks if self.notify.manager is not None else []:
            of_callback = getattr(callback, "state_components", None)
            parts += of_callback() if callable(of_callback) else []
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


def finite_numbers(metrics: Metrics) -> dict[str, float]:
    """The metrics that are numbers, as stored in a manifest; NaN and infinity cannot be ordered."""
    numbers = {key: value for key, value in metrics.items() if isinstance(value, (int, float))}
    return {key: float(value) for key, value in numbers.items() if math.isfinite(value)}


class CallbackStates:
    """Saves and loads every callback that has `state_dict` and `load_state_dict`, or `state` and `from_state`.

    The latter is Hugging Face's convention (`ExportableState`): what `state()` names is saved; its attributes are
    restored, while its arguments are those that this run's callback was created with.

    The id of a callback is its class's full name with its `state_key` attribute, or else with a digest of the plain
    values that it was created with. Equal ids are numbered in order. The ids are fixed when the run starts, before
    anything changes a callback, and do not depend on the other callbacks.
    """

    def __init__(self, manager: CallbackManager | None) -> None:
        self._manager = manager
        self._ids: dict[int, tuple[str, object]] = {}
        """The ids by Python's `id()`, which is valid as long as the callback is kept here."""
        self._current()

    def state_dict(self) -> StateDict:
        """The states by id."""
        states = {}
        for key, state in self._current().items():
            try:
                with HEARTBEAT.calling("state_dict", _name_of(key)):
                    states[key] = state.state_dict()
            except Exception as error:
                error.add_note("fix its state_dict, or remove the callback")
                raise
        return states

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restore every callback's state, and report by name what has no counterpart.

        Raises:
            CheckpointError: if a callback cannot load its own state.
        """
        callbacks = self._current()
        pairs = _matched(callbacks, state_dict)
        for key, saved_key in pairs.items():
            try:
                with HEARTBEAT.calling("load_state_dict", _name_of(key)):
                    callbacks[key].load_state_dict(state_dict[saved_key])
            except Exception as error:
                raise CheckpointError(
                    f"callback {_listed([key], callbacks)} cannot load its state from the checkpoint: "
                    f"{type(error).__name__}: {text_of(error)}. Remove the callback, or continue with the version that "
                    f"saved it."
                ) from error
        without = [key for key in callbacks if key not in pairs]
        if without:
            logger.warning(
                "the checkpoint has no state for callback %s, which starts afresh", _listed(without, callbacks)
            )
        unclaimed = [key for key in state_dict if key not in pairs.values()]
        if unclaimed:
            logger.warning(
                "the checkpoint has a state for callback %s, which this run does not have (removed or renamed?)",
                _listed(unclaimed, state_dict),
            )

    def make_durable(self) -> None:
        """Fsync the files that the states refer to: the callbacks that have `make_durable` do."""
        for key, state in self._current().items():
            with HEARTBEAT.calling("make_durable", _name_of(key)):
                make_durable(state)

    def _current(self) -> dict[str, HasState]:
        """The states of the current callbacks, by id; a callback added later gets its id when first seen."""
        current: dict[str, HasState] = {}
        taken = {key for key, _ in self._ids.values()}
        for one in self._manager.callbacks if self._manager is not None else []:
            state = _state_of(one)
            if state is None:
                continue
            if id(one) not in self._ids:
                own = getattr(one, "state_key", None)
                mark = own if isinstance(own, str) else _digest(state)
                kind = vars(type(one)).get("state_class") or f"{type(one).__module__}.{type(one).__qualname__}"
                base = f"{kind}[{mark}]"
                alike = (f"{base}#{number}" for number in itertools.count(2))
                self._ids[id(one)] = next(key for key in itertools.chain([base], alike) if key not in taken), one
                taken.add(self._ids[id(one)][0])
            current[self._ids[id(one)][0]] = state
        return current


def _name_of(key: str) -> str:
    """The name of the class in a callback's id."""
    return key.partition("[")[0].rpartition(".")[2]


class _Exported:
    """The state of an `ExportableState`, that of `transformers` included, recognized by its methods."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner

    def state_dict(self) -> StateDict:
        state = self.owner.state()
        return {"args": dict(state.get("args", {})), "attributes": dict(state.get("attributes", {}))}

    def load_state_dict(self, state_dict: StateDict) -> None:
        is_flat = state_dict.keys() != {"args", "attributes"}  # up to version 0.4: the attributes alone
        for name, value in (state_dict if is_flat else state_dict["attributes"]).items():
            setattr(self.owner, name, value)


def _state_of(callback: object) -> HasState | None:
    """The object that holds a callback's state; None for a callback without one."""
    if hasattr(callback, "get_last_lr"):  # a scheduler that is a callback too is saved as scheduler
        return None
    exported = _Exported(callback) if is_exportable(callback) else None
    return callback if has_state(callback) else exported


def _digest(state: HasState) -> str:
    """Eight hex digits of the callback's plain values, or of its arguments if it exposes them."""
    values = state.owner.state().get("args", {}) if isinstance(state, _Exported) else getattr(state, "__dict__", {})
    plain = {key: value for key, value in sorted(values.items()) if isinstance(value, _PLAIN)}
    return hashlib.blake2b(repr(plain).encode(), digest_size=4).hexdigest()


def _matched(callbacks: Iterable[str], saved: StateDict) -> dict[str, str]:
    """Each callback's id with the saved id whose state it loads: the same one, else the only one left of its class.

    The latter is logged if it was created with other values. Two with different names from the user never match.
    """
    pairs = {key: key for key in callbacks if key in saved}
    for key in callbacks:
        if key in pairs:
            continue
        free = [one for one in saved if one not in pairs.values() and _class_of(one) == _class_of(key)]
        alike = [one for one in callbacks if one not in pairs and _class_of(one) == _class_of(key)]
        if len(free) == 1 and len(alike) == 1 and not (_is_named(key) and _is_named(free[0])):
            pairs[key] = free[0]
            if _mark_of(free[0]):
                logger.warning("callback %s loads the state of %s, the only one of its class", key, free[0])
    return pairs


def _listed(keys: list[str], among: Iterable[str]) -> str:
    """Ids for messages: only the class, if it is unique."""
    classes = [_class_of(one) for one in among]
    return ", ".join(_class_of(key) if classes.count(_class_of(key)) == 1 else key for key in keys)


def _class_of(key: str) -> str:
    return key.partition("[")[0].partition("#")[0]


def _mark_of(key: str) -> str:
    """The `state_key` or digest in an id; empty for an id without one in an older checkpoint."""
    return key.partition("[")[2].rpartition("]")[0]


def _is_named(key: str) -> bool:
    """Whether the user has named it with `state_key`."""
    mark = _mark_of(key)
    return mark != "" and _DIGEST.fullmatch(mark) is None
