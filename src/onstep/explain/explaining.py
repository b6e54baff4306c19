"""Explains a script: what of it derives from exchanged classes, and the outcome of its overrides and attributes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from onstep.errors import ConfigError
from onstep.exchange.names import NAMES
from onstep.explain.outcomes import Outcome, OutcomeName, Outcomes
from onstep.explain.reached import reached_from
from onstep.explain.source.classes import Classes, ClassInfo
from onstep.explain.source.kinds import kind_of_class
from onstep.explain.source.modules import Module, Sources
from onstep.explain.source.resolver import (
    ClassDefinition,
    Denoted,
    Exchanged,
    Missing,
    ModuleName,
    Resolver,
)
from onstep.explain.source.uses import Patch, Use
from onstep.explain.source.walk import Walk, walk


@dataclass(frozen=True)
class Row:
    """An override, a use of an attribute, or an assignment to a class or module.

    Args:
        name: of the method; `args.name` of an attribute; `Trainer.name` of an assignment.
        verb: override, read, ask, super, set, pass, assign, or source, where the source of a method is read.
        owner: the class that has it; the module, outside of classes.
    """

    name: str
    verb: str
    owner: str
    path: str
    line: int
    outcome: OutcomeName
    when: str = ""
    instead: str = ""

    @property
    def words(self) -> str:
        """The outcome in words."""
        if self.outcome != "never":
            return self.outcome
        return "no effect" if self.verb == "source" or self.name.startswith("transformers.") else "never called"

    @property
    def remark(self) -> str:
        """When it has this outcome, and what to do instead."""
        return ": ".join(part for part in (self.when, self.instead) if part)


@dataclass(frozen=True)
class ClassRow:
    """A class that derives from an exchanged class, or is a mixin of one."""

    name: str
    kind: str
    roots: list[str]
    path: str
    line: int
    not_found: list[str]


@dataclass
class Explanation:
    """The outcome of all overrides and attributes in some modules.

    Args:
        exchanged: the names that are Onstep's, by module of transformers.
        modules: the modules that were looked into.
        imports: how many names are imported from transformers' modules of a Trainer; whether they are exchanged.
        not_found: modules of bases that were not found.
    """

    exchanged: dict[str, list[str]] = field(
        default_factory=lambda: {name: list(names) for name, names in NAMES.items()}
    )
    modules: list[str] = field(default_factory=list)
    classes: list[ClassRow] = field(default_factory=list)
    overrides: list[Row] = field(default_factory=list)
    attributes: list[Row] = field(default_factory=list)
    assigned: list[Row] = field(default_factory=list)
    imports: dict[str, int] = field(default_factory=dict)
    not_found: list[str] = field(default_factory=list)


def count(rows: Iterable[Row]) -> Counter[str]:
    """How many rows have each outcome."""
    return Counter(row.outcome for row in rows)


def exchanged_names() -> set[tuple[str, str]]:
    """The modules and names of the exchanged classes."""
    return {(module, name) for module, names in NAMES.items() for name in names}


def explain_script(path: Path) -> Explanation:
    """Explain a script and the modules that it imports, without running it.

    Raises:
        ConfigError: if it isn't readable Python, or transformers isn't installed.
    """
    sources = Sources()
    return _explained(sources, sources.script(path))


def explain_module(name: str) -> Explanation:
    """Explain a module, as of `python -m name`.

    Raises:
        ConfigError: if there is no such module, or transformers isn't installed.
    """
    sources = Sources([Path.cwd()])
    module = sources.module(f"{name}.__main__") or sources.module(name)
    if module is None or module.is_package:
        raise ConfigError(f"there is no module {name} to run with a readable source; name a script, or another module.")
    return _explained(sources, module)


def _explained(sources: Sources, first: Module) -> Explanation:
    outcomes = Outcomes()
    if not outcomes.has_reference():
        raise ConfigError(
            "transformers is not installed, so that there is nothing to exchange; pip install transformers."
        )
    resolver = Resolver(sources, exchanged_names())
    return explain_modules(reached_from(first, resolver), resolver, outcomes)


def explain_modules(modules: Iterable[Module], resolver: Resolver, outcomes: Outcomes) -> Explanation:
    """Explain all classes and functions of some modules."""
    modules = list(modules)
    found = walk(modules, resolver)
    explanation = Explanation(modules=[module.name for module in modules])
    for info, kind in found.kinds.items():
        explanation.classes.append(_class_row(info, kind))
        explanation.overrides += _overrides(info, kind, outcomes)
    explanation.overrides += _assigned_to_objects(found, outcomes)
    explanation.attributes += _attributes(found, outcomes)
    explanation.assigned += _assigned(found, resolver, outcomes)
    explanation.imports = _imports(found, resolver)
    explanation.not_found = sorted({name for row in explanation.classes for name in row.not_found})
    return explanation


def _class_row(info: ClassInfo, kind: str) -> ClassRow:
    module, node = info.definition.module, info.definition.node
    return ClassRow(info.name, kind, info.roots, str(module.path), node.lineno, info.missing)


def _overrides(info: ClassInfo, kind: str, outcomes: Outcomes) -> Iterator[Row]:
    path = str(info.definition.module.path)
    for name, member in info.defined.items():
        outcome = outcomes.override(kind, name)
        if outcome is not None:
            yield _row(name, "override", info.name, path, member.line, outcome)


def _assigned_to_objects(found: Walk, outcomes: Outcomes) -> Iterator[Row]:
    """Methods that are assigned to an object: `trainer.create_optimizer = function`."""
    for use in _distinct(use for use in found.uses if use.verb == "set"):
        outcome = outcomes.assigned(use.kind, use.name)
        if outcome is not None:
            name = use.name if use.kind in ("trainer", "callback") else f"{use.kind}.{use.name}"
            yield _row(name, "assign", _owner(use), str(use.module.path), use.line, outcome)


def _attributes(found: Walk, outcomes: Outcomes) -> Iterator[Row]:
    for use in _distinct([*found.uses, *_class_attributes(found)]):
        if use.verb == "set" and outcomes.assigned(use.kind, use.name) is not None:
            continue
        outcome = outcomes.attribute(use, found)
        if outcome is not None:
            name = f"{use.kind.rstrip('(')}.{use.name}"
            yield _row(name, use.verb, _owner(use), str(use.module.path), use.line, outcome)


def _class_attributes(found: Walk) -> Iterator[Use]:
    """What classes set in their bodies: `label_names = ["labels"]`, the default of a field."""
    for info, kind in found.kinds.items():
        for name, member in info.defined.items():
            if not member.is_method:
                yield Use(kind, name, "set", info.definition.module, member.line, info, on_self=True)


def _distinct(uses: Iterable[Use]) -> list[Use]:
    """The first use of each name in each class; outside of classes, in each module."""
    seen: dict[tuple[object, str, str, bool], Use] = {}
    for use in uses:
        seen.setdefault((use.owner or use.module, use.kind, use.name, use.verb == "set"), use)
    return list(seen.values())


def _owner(use: Use) -> str:
    return use.module.name if use.owner is None else use.owner.name


def _assigned(found: Walk, resolver: Resolver, outcomes: Outcomes) -> Iterator[Row]:
    classes = Classes(resolver)
    for patch in found.patches:
        kind = kind_of_class(patch.target, classes)
        outcome = outcomes.patch(patch, kind)
        if outcome is not None:
            path = str(patch.module.path)
            verb = "source" if patch.reads_source else "assign"
            yield _row(f"{_target(patch)}.{patch.name}", verb, patch.module.name, path, patch.line, outcome)


def _target(patch: Patch) -> str:
    match patch.target:
        case Exchanged(name) | ModuleName(name):
            return name
        case ClassDefinition() as definition:
            return definition.node.name


def _imports(found: Walk, resolver: Resolver) -> dict[str, int]:
    counts = Counter[str]()
    for source, name in found.imports:
        if source.startswith("transformers.train"):
            counts[_kind_of_import(resolver.member(source, name))] += 1
    return dict(counts)


def _kind_of_import(denoted: Denoted | None) -> str:
    match denoted:
        case Exchanged():
            return "exchanged"
        case Missing():
            return "not there"
        case _:
            return "transformers' own"


def _row(name: str, verb: str, owner: str, path: str, line: int, outcome: Outcome) -> Row:
    return Row(name, verb, owner, path, line, outcome.name, outcome.when, outcome.instead)
