"""Defines Hugging Face's `ExportableState`, the interface of callbacks whose state is saved with checkpoints."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

from onstep.train_state import StateDict


class ExportableState:
    """Base class of callbacks that say what to save: `state()` returns their `args` and `attributes`.

    class CountSteps(TrainerCallback, ExportableState):
        def __init__(self, limit: int) -> None:
            self.limit, self.count = limit, 0

        def state(self):
            return {"args": {"limit": self.limit}, "attributes": {"count": self.count}}

    `args` are the arguments of the constructor; both must be plain values.
    """

    def state(self) -> StateDict:
        """The constructor's arguments as `args`, and as `attributes` what is set on the object afterwards.

        Raises:
            NotImplementedError: unless overridden.
        """
        raise NotImplementedError(f"{type(self).__name__} derives from ExportableState and must define state().")

    @classmethod
    def from_state(cls, state: StateDict) -> Self:
        """A new object with this state; `args` and `attributes` may be missing."""
        instance = cls(**state.get("args", {}))
        for name, value in state.get("attributes", {}).items():
            setattr(instance, name, value)
        return instance


def is_exportable(thing: object) -> bool:
    """Whether an object has the interface, in Onstep's class, in that of `transformers` or by its methods alone."""
    return all(callable(getattr(type(thing), name, None)) for name in ("state", "from_state"))


def exported_states(things: Iterable[object]) -> StateDict:
    """The states of those that are exportable by class name, as in `trainer_state.json`; of several, a list."""
    states: StateDict = {}
    for thing in things:
        if is_exportable(thing):
            states.setdefault(type(thing).__name__, []).append(thing.state())  # type: ignore[attr-defined]
    return {name: found[0] if len(found) == 1 else found for name, found in states.items()}
