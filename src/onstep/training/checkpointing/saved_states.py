"""What a run's checkpoints hold: its components, and the states of what is neither model nor optimizer."""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from onstep.checkpoint import ModelState, RngState, SharingPattern, StateComponent, Stateful, check_encodable
from onstep.data import StepSource
from onstep.errors import CheckpointError
from onstep.events import CallbackManager, Dispatcher, Request
from onstep.events.control import FLAGS
from onstep.optim import OptimizerParamScheduler
from onstep.optim.protocol import HasState
from onstep.training.protocols import Metrics, StateDict, Trained, UserScheduler, has_state
from onstep.training.run import Run

logger = logging.getLogger(__name__)

COMPONENTS = ("model", "optimizer", "scheduler", "trainer", "dataset", "rng", "callbacks")
"""What `checkpoint.components` selects from."""

_OF_TRAINER = ("loop", "rank")
"""What belongs to `trainer`: what the loop remembers between steps, alike on all ranks and on each."""


_PLAIN = (str, int, float, bool, type(None))
_DIGEST = re.compile("[0-9a-f]{8}")


class RunComponents:
    """The components of a run, for saving and for loading: which there are, and on which ranks each of them differs."""

    def __init__(self, state: Run, tell: Dispatcher) -> None:
        self.state = state
        self.tell = tell
        self.callbacks = CallbackStates(tell.manager)
        self.rng = RngState(state.world.device)
        self.is_chosen_start = False
        """The start was asked for, so `load_optim` and `load_rng` say how much of it is taken."""

    def progress(self, trained: Trained, loads: bool = False) -> list[StateComponent]:
        """What is loaded before data is opened."""
        config, selected = self.state.cfg.checkpoint, self.state.cfg.checkpoint.components is None

        def compared(key: str, part: Stateful) -> StateComponent:
            return _replicated(key, part, required=selected, validate_replication=config.validate_replication)

        parts = [compared("model", ModelState(trained.model))]
        has_optimizer = (config.load_optim or not self.is_chosen_start) if loads else config.save_optim
        if trained.optimizer is not None and has_optimizer:
            parts.append(compared("optimizer", trained.optimizer))
            if trained.scheduler is not None:
                parts.append(self.scheduler(trained.scheduler))
        parts.append(_replicated("trainer", RunProgress(self.state), required=selected))
        return [*parts, _of_the_rank("callbacks", self.callbacks), *self._of_the_user()]

    def position(self, data: DataPosition | None, loads: bool = False) -> list[StateComponent]:
        """What is loaded right before the first step; `data` is None where the data stays where it is."""
        config, features = self.state.cfg.checkpoint, self.state.features
        parts = [_replicated("loop", LoopParts(features.states(per_rank=False)))]
        if data is not None:
            parts.append(_of_the_rank("dataset", data))
        own = features.states(per_rank=True)
        if own:
            parts.append(_of_the_rank("rank", LoopParts(own)))
        if (config.load_rng or not self.is_chosen_start) if loads else config.save_rng:
            parts.append(_of_the_rank("rng", self.rng))
        return parts

    def selected(self, components: list[StateComponent]) -> list[StateComponent]:
        """Those that `checkpoint.components` asks for; what the user brings is always among them."""
        wanted = self.state.cfg.checkpoint.components
        if wanted is None:
            return components
        keep = {*wanted, *(_OF_TRAINER if "trainer" in wanted else ())}
        return [one for one in components if one.key in keep or one.key not in (*COMPONENTS, *_OF_TRAINER)]

    def scheduler(self, scheduler: UserScheduler) -> StateComponent:
        """Where the schedule stands."""
        return _replicated("scheduler", SchedulerPosition(scheduler))

    def check_states(self, trained: Trained) -> None:
        """See `RunCheckpoints.check_states`."""
        config, optimizer = self.state.cfg.checkpoint, trained.optimizer
        if config.save_optim and optimizer is not None and not has_state(optimizer):
            raise CheckpointError(
                f"the optimizer {type(optimizer).__name__} has no state_dict and load_state_dict, so no checkpoint can "
                f"hold it; give it both, or set checkpoint.save_optim=false."
            )
        if config.components is None or "callbacks" in config.components:
            check_encodable(self.callbacks.state_dict(), "callbacks")
        if trained.scheduler is not None and config.save_optim:
            check_encodable(SchedulerPosition(trained.scheduler).state_dict(), "scheduler")

    def _of_the_user(self) -> list[StateComponent]:
        """What the user's objects bring: a forward step with a state, and the `state_components()` of callbacks."""
        forward_step = self.state.door.forward_step_func
        parts = [_of_the_rank("forward_step", forward_step)] if has_state(forward_step) else []
        for callback in self.tell.manager.callbacks if self.tell.manager is not None else []:
            of_callback = getattr(callback, "state_components", None)
            parts += of_callback() if callable(of_callback) else []
        return parts


def _replicated(
    key: str, part: Stateful, *, required: bool = False, validate_replication: bool = False
) -> StateComponent:
    pattern = SharingPattern.REPLICATED
    return StateComponent(key, part, pattern, required=required, validate_replication=validate_replication)


def _of_the_rank(key: str, part: Stateful) -> StateComponent:
    return StateComponent(key, part, SharingPattern.PER_RANK, required=False)


class RunProgress:
    """Counters, pending decisions and what the mean loss is made of: the same on all ranks.

    Of the log there is only its length, for a run that goes back, and the final metrics: the records are the journal's.
    """

    def __init__(self, state: Run) -> None:
        self._state = state

    def state_dict(self) -> StateDict:
        """Plain values, and Megatron Bridge's counters as 0-d tensors."""
        state, history = self._state, self._state.facts.log_history
        return {
            "train_state": state.train_state.state_dict(),
            "flags": {flag: getattr(state.control, flag) for flag in FLAGS},
            "stopped_by": None if state.ending.stopped_by is None else vars(state.ending.stopped_by),
            "loss_sum": state.sums.loss_sum,
            "loss_steps": state.sums.loss_steps,
            "num_records": len(history),
            "final_metrics": next((dict(record) for record in reversed(history) if "train_runtime" in record), None),
            "last_metrics": dict(state.evaluated.last_metrics),
            "evaluated_at": state.evaluated.at_step,
            "epoch_is_open": state.stage.epoch_is_open,
            "was_concluded": state.stage.was_concluded,
        }

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Take everything over; a decided stop stays decided."""
        state = self._state
        state.train_state.load_state_dict(state_dict["train_state"])
        for flag, value in state_dict["flags"].items():
            if flag in FLAGS:
                state.control.__dict__[flag] = value
        asked = state_dict["stopped_by"]
        state.ending.stopped_by = None if asked is None else Request(**asked)
        state.sums.loss_sum, state.sums.loss_steps = state_dict["loss_sum"], state_dict["loss_steps"]
        history, final = state.facts.log_history, state_dict.get("final_metrics")
        if "log_history" in state_dict:  # as checkpoints before version 0.5 have it
            history[:] = state_dict["log_history"]
        num_records, step = state_dict.get("num_records", len(history)), state.train_state.step
        history[:] = [record for record in history[:num_records] if record["step"] <= step]
        if final is not None and not history:
            history.append(dict(final))
        state.evaluated.last_metrics, state.evaluated.at_step = state_dict["last_metrics"], state_dict["evaluated_at"]
        state.stage.epoch_is_open, state.stage.was_concluded = state_dict["epoch_is_open"], state_dict["was_concluded"]


class LoopParts:
    """What the loop itself remembers between steps, by name: the log interval, the anomaly watch, ..."""

    def __init__(self, parts: Mapping[str, Stateful]) -> None:
        self._parts = parts

    def state_dict(self) -> StateDict:
        """The states by name."""
        return {name: part.state_dict() for name, part in self._parts.items()}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Hand over what there is; a part that the checkpoint does not know starts anew."""
        for name, part in self._parts.items():
            if name in state_dict:
                part.load_state_dict(state_dict[name])


class SchedulerPosition:
    """Where a scheduler stands, and for our own, whether its schedule is the saved one (see its `load_state_dict`)."""

    def __init__(self, scheduler: UserScheduler) -> None:
        self._scheduler = scheduler

    def state_dict(self) -> StateDict:
        """The scheduler's own state."""
        return self._scheduler.state_dict()

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue at the saved count.

        Raises:
            ConfigError: our own is of another schedule, and nothing says which of the two holds.
        """
        if isinstance(self._scheduler, OptimizerParamScheduler):
            self._scheduler.num_steps = 0  # to which the saved count is added
        self._scheduler.load_state_dict(state_dict)


class DataPosition:
    """Where this rank's reader stands: (epoch, samples taken), and the state of a stateful iterable."""

    def __init__(self, reader: StepSource, state: Run) -> None:
        self._reader = reader
        self._state = state
        self.is_loaded = False

    def state_dict(self) -> StateDict:
        """The reader's own position after what was handed out."""
        return self._reader.state_dict()

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue there."""
        self._reader.load_state_dict(state_dict)
        self.is_loaded = True

    def seek(self) -> None:
        """Go to the position that the progress tells, which is the same for any number of ranks.

        A raw iterator stays where its own state brought it: it cannot seek.
        """
        if self.is_loaded and not self._reader.has_epochs:
            return
        progress = self._state.train_state
        self._reader.seek(progress.epoch, progress.samples_in_epoch)


def finite_numbers(metrics: Metrics) -> dict[str, float]:
    """The metrics that are numbers, as a manifest keeps them; NaN and infinity have no place in an order."""
    numbers = {key: value for key, value in metrics.items() if isinstance(value, (int, float))}
    return {key: float(value) for key, value in numbers.items() if math.isfinite(value)}


class CallbackStates:
    """Saves and loads every callback that has `state_dict` and `load_state_dict`, or `state` and `from_state`.

    The latter is the convention of `transformers`, such as its EarlyStoppingCallback: the attributes that `state()`
    names are saved and set, while the arguments are today's.

    The id of a callback is its class's full name with its `state_key` attribute, or else with a digest of the plain
    values that it was made with. Equal ones are told apart by their order. The ids are taken when the run starts,
    before anything changes a callback, and do not depend on which others there are.
    """

    def __init__(self, manager: CallbackManager | None) -> None:
        self._manager = manager
        self._ids: dict[int, tuple[str, object]] = {}
        """The ids by Python's own, which holds as long as the callback is kept here."""
        self._current()

    def state_dict(self) -> StateDict:
        """The states by id."""
        return {key: state.state_dict() for key, state in self._current().items()}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Hand every callback its state, and report by name what has no counterpart.

        Raises:
            CheckpointError: when a callback cannot take its own state.
        """
        callbacks = self._current()
        pairs = _matched(callbacks, state_dict)
        for key, saved_key in pairs.items():
            try:
                callbacks[key].load_state_dict(state_dict[saved_key])
            except Exception as error:
                raise CheckpointError(
                    f"callback {_listed([key], callbacks)} cannot take the state that the checkpoint has for it: "
                    f"{type(error).__name__}: {error}. Remove the callback, or continue with the version that saved it."
                ) from error
        without = [key for key in callbacks if key not in pairs]
        if without:
            logger.warning("the checkpoint has no state for callback %s; it starts anew", _listed(without, callbacks))
        unclaimed = [key for key in state_dict if key not in pairs.values()]
        if unclaimed:
            logger.warning(
                "the checkpoint has a state for callback %s, which this run does not have (removed or renamed?)",
                _listed(unclaimed, state_dict),
            )

    def _current(self) -> dict[str, HasState]:
        """The states of the callbacks that there are now, by id; one that joined later is named when first seen."""
        current: dict[str, HasState] = {}
        taken = {key for key, _ in self._ids.values()}
        for one in self._manager.callbacks if self._manager is not None else []:
            state = _state_of(one)
            if state is None:
                continue
            if id(one) not in self._ids:
                own = getattr(one, "state_key", None)
                mark = own if isinstance(own, str) else _digest(state)
                base = f"{type(one).__module__}.{type(one).__qualname__}[{mark}]"
                alike = (f"{base}#{number}" for number in itertools.count(2))
                self._ids[id(one)] = next(key for key in itertools.chain([base], alike) if key not in taken), one
                taken.add(self._ids[id(one)][0])
            current[self._ids[id(one)][0]] = state
        return current


class _Exported:
    """The state of an ExportableState of `transformers`, which is recognised without importing it."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner

    def state_dict(self) -> StateDict:
        return dict(self.owner.state()["attributes"])

    def load_state_dict(self, state_dict: StateDict) -> None:
        for name, value in state_dict.items():
            setattr(self.owner, name, value)


def _state_of(callback: object) -> HasState | None:
    """What has the state of a callback; None for one without."""
    if hasattr(callback, "get_last_lr"):  # a scheduler that is a callback too is saved as scheduler
        return None
    if has_state(callback):
        return callback
    is_exportable = all(callable(getattr(type(callback), name, None)) for name in ("state", "from_state"))
    return _Exported(callback) if is_exportable else None


def _digest(state: HasState) -> str:
    """Eight hex digits of the plain values that the callback holds; of its arguments, where it tells them."""
    values = state.owner.state().get("args", {}) if isinstance(state, _Exported) else getattr(state, "__dict__", {})
    plain = {key: value for key, value in sorted(values.items()) if isinstance(value, _PLAIN)}
    return hashlib.blake2b(repr(plain).encode(), digest_size=4).hexdigest()


def _matched(callbacks: Iterable[str], saved: StateDict) -> dict[str, str]:
    """Each callback's id with the saved id whose state it takes: the same one, else the only one left of its class.

    The latter is told where it was made with other values. Two that their user has named differently never match.
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
                logger.warning("callback %s takes the state of %s, the only one of its class", key, free[0])
    return pairs


def _listed(keys: list[str], among: Iterable[str]) -> str:
    """Ids in words: only the class, where there is no other one of it."""
    classes = [_class_of(one) for one in among]
    return ", ".join(_class_of(key) if classes.count(_class_of(key)) == 1 else key for key in keys)


def _class_of(key: str) -> str:
    return key.partition("[")[0].partition("#")[0]


def _mark_of(key: str) -> str:
    """The `state_key` or digest in an id; empty where a checkpoint has an id without one."""
    return key.partition("[")[2].rpartition("]")[0]


def _is_named(key: str) -> bool:
    """Whether the user has named it by `state_key`."""
    mark = _mark_of(key)
    return mark != "" and _DIGEST.fullmatch(mark) is None
