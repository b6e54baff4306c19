"""Collects from modules the classes of a Trainer, what they override, and what code uses of it."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from onstep.explain.source.classes import Classes, ClassInfo
from onstep.explain.source.kinds import KINDS
from onstep.explain.source.modules import Module
from onstep.explain.source.resolver import ClassDefinition, Resolver
from onstep.explain.source.scopes import Scope, scope_of_function, statements
from onstep.explain.source.uses import Patch, Use, UsesOfModule

COLLATORS = "transformers.data.data_collator"
"""The module of the base classes of data collators, which aren't exchanged."""


@dataclass
class Walk:
    """What was found.

    Args:
        kinds: the kind of each class of a Trainer, arguments, callback, ... and of their mixins.
        own: names that the classes with a mixin define, by the mixin.
        imports: the names imported from modules of transformers, with these modules.
    """

    kinds: dict[ClassInfo, str] = field(default_factory=dict)
    own: dict[ClassInfo, set[str]] = field(default_factory=lambda: defaultdict(set))
    uses: list[Use] = field(default_factory=list)
    patches: list[Patch] = field(default_factory=list)
    imports: set[tuple[str, str]] = field(default_factory=set)

    def is_own(self, use: Use) -> bool:
        """Whether a class has an attribute of its own, or of a library's class that it derives from."""
        return use.on_self and use.owner is not None and use.name in self.own[use.owner]


def walk(modules: Iterable[Module], resolver: Resolver) -> Walk:
    """Walk modules."""
    found, classes = Walk(), Classes(resolver)
    modules = list(modules)
    definitions = [one for module in modules for one in class_definitions(module, resolver.scope(module))]
    infos = [classes.of(one) for one in definitions]
    for info in infos:
        chain = info.chain()
        kind = next((KINDS[root] for root in info.roots if root in KINDS), None)
        if kind is None and any(one.definition.module.name == COLLATORS for one in chain):
            kind = "collator"
        if kind is None:
            continue
        names = {name for one in chain for name in (*one.defined, *one.assigned)}
        for one in chain:
            found.kinds.setdefault(one, kind)
            found.own[one] |= names
    kinds = {info.definition.node: kind for info, kind in found.kinds.items()}
    for module in modules:
        uses = UsesOfModule(module, classes, kinds)
        found.uses += uses.uses
        found.patches += uses.patches
        found.imports.update(_imports_of(module))
    found.kinds = {info: found.kinds[info] for info in infos if info in found.kinds}
    return found


def class_definitions(module: Module, scope: Scope) -> Iterator[ClassDefinition]:
    """All classes of a module, those in functions included."""
    yield from _definitions(module.tree.body, module, scope)


def _definitions(body: list[ast.stmt], module: Module, scope: Scope) -> Iterator[ClassDefinition]:
    for statement in statements(body):
        if isinstance(statement, ast.ClassDef):
            yield ClassDefinition(module, statement, scope)
            yield from _definitions(statement.body, module, scope)
        elif isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _definitions(statement.body, module, scope_of_function(statement, scope))


def _imports_of(module: Module) -> Iterator[tuple[str, str]]:
    for node in module.nodes:
        if isinstance(node, ast.ImportFrom):
            source = module.imported(node)
            if source == "transformers" or source.startswith("transformers."):
                for alias in node.names:
                    if alias.name != "*":
                        yield source, alias.name
