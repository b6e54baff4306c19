"""Saves and loads the states of callbacks, each under an id that the next process finds again."""

from __future__ import annotations

import hashlib
import itertools
import logging
import re
from collections.abc import Iterable
from typing import Any

from onstep.checkpoint.components import make_durable
from onstep.errors import CheckpointError, named_text
from onstep.events import CallbackManager
from onstep.events.exportable_state import is_exportable
from onstep.optim.protocol import HasState
from onstep.processes.heartbeat import HEARTBEAT
from onstep.training.protocols import StateDict, has_state

logger = logging.getLogger(__name__)


_PLAIN = (str, int, float, bool, type(None))
_DIGEST = re.compile("[0-9a-f]{8}")


class CallbackStates:
    """Saves and loads every callback that has `state_dict` and `load_state_dict`, or `state` and `from_state`.

    The latter is Hugging Face's convention (`ExportableState`): what `state()` names is saved; its attributes are
    restored. Its arguments are those that this run's callback was created with, or with `restores_arguments` those of
    the checkpoint, with which the callback is initialized again.

    The id of a callback is its class's full name with its `state_key` attribute, or else with a digest of the plain
    values that it was created with. Equal ids are numbered in order. The ids are fixed when the run starts, before
    anything changes a callback, and do not depend on the other callbacks.
    """

    def __init__(self, manager: CallbackManager | None, *, restores_arguments: bool = False) -> None:
        self._manager = manager
        self._restores_arguments = restores_arguments
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
                    f"{named_text(error)}. Remove the callback, or continue with the version that "
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
            state = _state_of(one, self._restores_arguments)
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

    def __init__(self, owner: Any, restores_arguments: bool) -> None:
        self.owner = owner
        self._restores_arguments = restores_arguments

    def state_dict(self) -> StateDict:
        state = self.owner.state()
        return {"args": dict(state.get("args", {})), "attributes": dict(state.get("attributes", {}))}

    def load_state_dict(self, state_dict: StateDict) -> None:
        is_flat = state_dict.keys() != {"args", "attributes"}  # up to version 0.4: the attributes alone
        if self._restores_arguments and not is_flat:
            type(self.owner).__init__(self.owner, **state_dict["args"])
        for name, value in (state_dict if is_flat else state_dict["attributes"]).items():
            setattr(self.owner, name, value)


def _state_of(callback: object, restores_arguments: bool) -> HasState | None:
    """The object that holds a callback's state; None for a callback without one."""
    if hasattr(callback, "get_last_lr"):  # a scheduler that is a callback too is saved as scheduler
        return None
    exported = _Exported(callback, restores_arguments) if is_exportable(callback) else None
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
