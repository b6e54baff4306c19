"""Decides what happens to an override, an attribute and an assigned function under Onstep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from onstep.config.hf.process import REFUSED_ATTRIBUTES
from onstep.events.run_state import REFUSED
from onstep.explain.answers import Names, here, there
from onstep.explain.source.classes import Member
from onstep.explain.source.resolver import ClassDefinition, Exchanged, ModuleName
from onstep.explain.source.uses import Patch, Use
from onstep.explain.source.walk import Walk
from onstep.trainer.computing.refused_attributes import ACCELERATOR, CONFIGURE, OF_A_STEP, OTHERWISE, TRAINER
from onstep.trainer.default_names import SETTABLE
from onstep.trainer.overrides import METHODS, OF_ACCELERATOR

OutcomeName = Literal["honoured", "refused", "never", "missing"]
"""Called or there; refused by name with a remedy; never needed; or not there, which nothing says."""


@dataclass(frozen=True)
class Outcome:
    """What happens to it.

    Args:
        name: in one word.
        when: when an override is called, or refused; why it is never needed.
        instead: the remedy.
    """

    name: OutcomeName
    when: str = ""
    instead: str = ""


HONOURED, MISSING = Outcome("honoured"), Outcome("missing")
TRAINER_MODULES = frozenset(
    f"transformers.{name}"
    for name in ("trainer", "trainer_seq2seq", "trainer_utils", "trainer_pt_utils", "trainer_callback", "training_args")
)
"""Modules whose functions Hugging Face's Trainer uses."""
_NOT_OVERRIDES = ("__init__", "__module__", "__doc__", "__qualname__", "__slots__")


class Outcomes:
    """Compares names in sources with what the installed transformers and Onstep have."""

    def __init__(self) -> None:
        self._there, self._here = there(), here()

    def has_reference(self) -> bool:
        """Whether transformers is found, so that its names can be compared."""
        return self._there.of("trainer") is not None

    def override(self, kind: str, name: str) -> Outcome | None:
        """The outcome of a method that a class defines; None if it overrides none of transformers'."""
        if name in _NOT_OVERRIDES:
            return None
        if kind == "trainer" and name in METHODS:
            method = METHODS[name]
            if method.called:
                return Outcome("honoured", method.called)
            if method.refused:
                return Outcome("refused", method.refused, method.instead)
            return Outcome("never", method.unneeded)
        known = self._member(self._there, kind, name)
        if known is None or not known.is_method:
            return None
        return HONOURED if self._member(self._here, kind, name) is not None else MISSING

    def assigned(self, kind: str, name: str) -> Outcome | None:
        """The outcome of a method that is assigned to an object; None if it overrides none of transformers'."""
        outcome = self.override(kind, name)
        if kind == "accelerator" and outcome is HONOURED:
            caller = OF_ACCELERATOR.get(name)
            return Outcome("honoured", METHODS[caller].called if caller else "where you call it")
        return outcome

    def attribute(self, use: Use, walk: Walk) -> Outcome | None:
        """The outcome of a use of an attribute; None if it isn't one of transformers'."""
        if use.verb == "pass":
            return self._argument(use)
        known = self._member(self._there, use.kind, use.name)
        if known is None or (use.name.startswith("__") and use.name.endswith("__")):
            return None
        if use.verb not in ("set", "super") and walk.is_own(use):
            return None
        member = self._member(self._here, use.kind, use.name)
        if use.verb == "set" and use.kind == "state" and use.name in REFUSED:
            return Outcome("refused", "during a run", REFUSED[use.name].format(name=use.name))
        if member is not None and (use.verb != "set" or member.is_settable):
            return HONOURED
        remedy = _remedy(use, is_there=member is not None)
        return MISSING if remedy is None else Outcome("refused", instead=remedy)

    def patch(self, patch: Patch, kind: str | None) -> Outcome | None:
        """The outcome of an assignment to a class or module; None if it concerns nothing of a Trainer."""
        if kind is not None and patch.reads_source and patch.name in METHODS and isinstance(patch.target, Exchanged):
            return Outcome("never", "Onstep's method has another source, which a change of its text doesn't fit")
        match patch.target:
            case Exchanged() | ClassDefinition() if kind is not None and not patch.reads_source:
                if patch.name == "__init__":
                    return Outcome("honoured", "in the constructor")
                return self.override(kind, patch.name)
            case ModuleName("transformers.trainer") if patch.name in SETTABLE:
                return Outcome("honoured", "in the constructor")
            case ModuleName(name) if name in TRAINER_MODULES:
                return Outcome("never", "Onstep's Trainer doesn't use the functions of this module")
            case _:
                return None

    def _argument(self, use: Use) -> Outcome | None:
        kind = use.kind.rstrip("(")
        known, own = self._there.of(kind), self._here.of(kind)
        if known is None or use.name not in known.arguments:
            return None
        return HONOURED if own is not None and use.name in own.arguments else MISSING

    @staticmethod
    def _member(names: Names, kind: str, name: str) -> Member | None:
        found = names.of(kind)
        return None if found is None else found.members.get(name)


def _remedy(use: Use, *, is_there: bool) -> str | None:
    """What the error of a refused attribute says to do instead; None for one that no error names."""
    if use.kind in ("accelerator", "accelerator.state"):
        return CONFIGURE if is_there else ACCELERATOR.get(use.name, OTHERWISE)
    if use.kind == "accelerator.gradient_state":
        return CONFIGURE if is_there else OF_A_STEP
    if use.kind == "args" and not is_there:
        return REFUSED_ATTRIBUTES.get(use.name)
    if use.kind == "trainer" and not is_there:
        return TRAINER.get(use.name)
    return None
