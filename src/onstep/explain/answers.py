"""Lists the names of a Trainer and of what belongs to it, in transformers and in Onstep, from the sources of both."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import onstep
from onstep.events.events import HF_EVENTS
from onstep.explain.source.classes import Classes, ClassInfo, Member, assignments
from onstep.explain.source.modules import Sources
from onstep.explain.source.resolver import ClassDefinition, FunctionDefinition, Resolver

_OF_UPLOADS = "on_push_begin"
"""An event that the loop does not have."""
_THERE = {
    "trainer": ["transformers.trainer_seq2seq.Seq2SeqTrainer"],
    "args": ["transformers.training_args_seq2seq.Seq2SeqTrainingArguments"],
    "state": ["transformers.trainer_callback.TrainerState"],
    "control": ["transformers.trainer_callback.TrainerControl"],
    "callback": ["transformers.trainer_callback.TrainerCallback"],
    "callback_handler": ["transformers.trainer_callback.CallbackHandler"],
    "accelerator": ["accelerate.accelerator.Accelerator"],
    "accelerator.state": ["accelerate.state.AcceleratorState", "accelerate.state.PartialState"],
    "accelerator.gradient_state": ["accelerate.state.GradientState"],
    "args.distributed_state": ["accelerate.state.PartialState"],
    "args.accelerator_config": ["transformers.trainer_pt_utils.AcceleratorConfig"],
}
_HERE = {
    "trainer": [
        "onstep.trainer.seq2seq.Seq2SeqTrainer",
        "onstep.trainer.computing.attributes.set_attributes",
        "onstep.trainer.computing.attributes.follow_arguments",
    ],
    "args": ["onstep.config.hf.seq2seq.Seq2SeqTrainingArguments"],
    "state": ["onstep.events.run_state.RunState"],
    "control": ["onstep.events.control.Control"],
    "callback": ["onstep.events.callback.TrainerCallback"],
    "callback_handler": ["onstep.trainer.callback_handler.TrainerCallbackHandler"],
    "accelerator": ["onstep.trainer.computing.accelerator.Accelerator"],
    "accelerator.state": ["onstep.trainer.computing.accelerator.Accelerator"],
    "accelerator.gradient_state": ["onstep.trainer.computing.gradients.GradientState"],
    "args.distributed_state": ["accelerate.state.PartialState"],
    "args.accelerator_config": ["onstep.config.hf.accelerator.AcceleratorConfig"],
}
"""Where each kind is defined; a function is one that sets attributes of its first parameter."""


@dataclass(frozen=True)
class Kind:
    """The names of a kind of objects.

    Args:
        members: attributes and methods by name.
        arguments: the keywords of its constructor; None if it accepts any.
    """

    members: Mapping[str, Member]
    arguments: frozenset[str]


class Names:
    """The names of each kind of objects in a distribution.

    Args:
        places: full names of classes and functions by kind.
    """

    def __init__(self, sources: Sources, places: Mapping[str, list[str]]) -> None:
        self._classes = Classes(Resolver(sources))
        self._places = places
        self._kinds: dict[str, Kind | None] = {}

    def of(self, kind: str) -> Kind | None:
        """The names of a kind; None if its classes aren't found."""
        if kind not in self._kinds:
            found = [one for place in self._places.get(kind, ()) for one in [self._members(place)] if one]
            members = {name: member for one in reversed(found) for name, member in one.items()}
            self._kinds[kind] = self._made(kind, members) if found else None
        return self._kinds[kind]

    def _made(self, kind: str, members: dict[str, Member]) -> Kind:
        if kind.startswith("callback") and self._places is _HERE:  # their methods are made from the table of events
            events = HF_EVENTS | {_OF_UPLOADS}
            members = {**{name: Member(name, 0, is_method=True) for name in events}, **members}
        return Kind(members, self._arguments(kind))

    def _members(self, place: str) -> dict[str, Member]:
        module, _, name = place.rpartition(".")
        match self._classes.resolver.member(module, name):
            case ClassDefinition() as definition:
                return members_of(self._classes.of(definition))
            case FunctionDefinition(node=node):
                parameter = node.args.args[0].arg
                return {name: Member(name, line) for name, line in assignments(node, parameter)}
            case _:
                return {}

    def _arguments(self, kind: str) -> frozenset[str]:
        module, _, name = self._places[kind][0].rpartition(".")
        definition = self._classes.resolver.member(module, name)
        if not isinstance(definition, ClassDefinition):
            return frozenset()
        info = self._classes.of(definition)
        names: set[str] = set()
        for constructor in _constructors(info):
            names |= {one.arg for one in [*constructor.args.args[1:], *constructor.args.kwonlyargs]}
            if constructor.args.kwarg is None:
                return frozenset(names)
        return frozenset(member.name for member in members_of(info).values() if not member.is_method)


def _constructors(info: ClassInfo) -> Iterator[ast.FunctionDef]:
    """The constructors of a class and its ancestors, nearest first."""
    for one in info.chain():
        for statement in one.definition.node.body:
            if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
                yield statement


def members_of(info: ClassInfo) -> dict[str, Member]:
    """All attributes of a class's objects, the nearest definition of each."""
    members: dict[str, Member] = {}
    for one in info.chain():
        for name, member in [*one.defined.items(), *one.assigned.items()]:
            members.setdefault(name, member)
    return members


@cache
def there() -> Names:
    """What the installed transformers and accelerate have."""
    return Names(Sources(), _THERE)


@cache
def here() -> Names:
    """What Onstep has."""
    return Names(Sources([Path(str(onstep.__file__)).parents[1]]), _HERE)
