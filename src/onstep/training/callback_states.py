"""The states of callbacks in a checkpoint, each under an id that does not depend on its place in the list."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterable
from typing import Any

from onstep.errors import CheckpointError
from onstep.events import CallbackManager
from onstep.training.saved_parts import is_stateful
from onstep.training.seams import StateDict

logger = logging.getLogger(__name__)

_PLAIN = (str, int, float, bool, type(None))
_DIGEST = re.compile("[0-9a-f]{8}")


class CallbackStates:
    """Saves and loads every callback that has `state_dict` and `load_state_dict`, or `state` and `from_state`.

    The latter is the convention of `transformers`, such as its EarlyStoppingCallback: the attributes that `state()`
    names are saved and set, while the arguments are today's.

    The id of a callback is its class's full name with its `state_key` attribute, or else with a digest of the plain
    values that it was made with. Equal ones are told apart by their order. The ids are taken when the run starts,
    before anything changes a callback, and do not depend on which others there are.
    """

    def __init__(self, manager: CallbackManager | None) -> None:
        stateful = [one for one in (manager.callbacks if manager is not None else []) if _is_stateful(one)]
        self._manager = manager
        self._ids: dict[int, str] = {}
        self._owners: dict[int, Any] = {}
        self._name(stateful)

    def state_dict(self) -> StateDict:
        """The states by id."""
        return {key: _state_of(callback) for key, callback in self._current().items()}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Hand every callback its state, and report by name what has no counterpart.

        Raises:
            CheckpointError: when a callback cannot take its own state.
        """
        callbacks = self._current()
        pairs = _matched(callbacks, state_dict)
        for key, saved_key in pairs.items():
            try:
                _give_state(callbacks[key], state_dict[saved_key])
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

    def _current(self) -> dict[str, Any]:
        """The callbacks that there are now, by id; one that joined later is named when it is first seen."""
        present = [one for one in (self._manager.callbacks if self._manager is not None else []) if _is_stateful(one)]
        new = [one for one in present if id(one) not in self._ids]
        if new:
            self._name(new)
        return {self._ids[id(one)]: one for one in present}

    def _name(self, callbacks: list[Any]) -> None:
        taken = set(self._ids.values())
        for one in callbacks:
            own = getattr(one, "state_key", None)
            key = base = f"{_class_name(one)}[{own if isinstance(own, str) else _digest(one)}]"
            number = 2
            while key in taken:
                key, number = f"{base}#{number}", number + 1
            taken.add(key)
            self._ids[id(one)], self._owners[id(one)] = key, one


def _is_stateful(callback: Any) -> bool:
    if hasattr(callback, "get_last_lr"):  # a scheduler that is a callback too is saved as scheduler
        return False
    return is_stateful(callback) or _is_exportable(callback)


def _is_exportable(callback: Any) -> bool:
    """Whether it is an ExportableState of `transformers`, recognised without importing it."""
    kind = callback if isinstance(callback, type) else type(callback)
    return kind is not callback and all(callable(getattr(kind, name, None)) for name in ("state", "from_state"))


def _state_of(callback: Any) -> StateDict:
    state: StateDict = callback.state_dict() if is_stateful(callback) else dict(callback.state()["attributes"])
    return state


def _give_state(callback: Any, state: StateDict) -> None:
    if is_stateful(callback):
        callback.load_state_dict(state)
        return
    for name, value in state.items():
        setattr(callback, name, value)


def _class_name(callback: Any) -> str:
    return f"{type(callback).__module__}.{type(callback).__qualname__}"


def _digest(callback: Any) -> str:
    """Eight hex digits of the plain values that the callback holds; of its arguments, where it tells them."""
    values = callback.state().get("args", {}) if not is_stateful(callback) else getattr(callback, "__dict__", {})
    plain = {key: value for key, value in sorted(values.items()) if isinstance(value, _PLAIN)}
    return hashlib.blake2b(repr(plain).encode(), digest_size=4).hexdigest()


def _matched(callbacks: dict[str, Any], saved: StateDict) -> dict[str, str]:
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
