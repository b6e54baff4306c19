"""Finds what a name in a source denotes: a module, a class, a function, or a name that Onstep exchanges."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from onstep.explain.source.modules import Module, Sources, is_closed
from onstep.explain.source.scopes import (
    Defined,
    Element,
    Function,
    Imported,
    Scope,
    Value,
    scope_of_module,
)


@dataclass(frozen=True)
class ModuleName:
    """A module."""

    name: str


@dataclass(frozen=True)
class Exchanged:
    """A class of Hugging Face's that is Onstep's, by its name."""

    name: str


@dataclass(frozen=True)
class ClassDefinition:
    """A class in a source."""

    module: Module
    node: ast.ClassDef
    scope: Scope

    @property
    def full_name(self) -> str:
        """Module and name."""
        return f"{self.module.name}.{self.node.name}"


@dataclass(frozen=True)
class FunctionDefinition:
    """A function in a source."""

    module: Module
    node: Function
    scope: Scope


@dataclass(frozen=True)
class Missing:
    """A name whose module isn't found, or that its module doesn't bind."""

    name: str


Denoted = ModuleName | Exchanged | ClassDefinition | FunctionDefinition | Missing


class Resolver:
    """Resolves names in the modules of `sources`.

    Args:
        exchanged: module and name of each exchanged class; empty to see the classes of transformers themselves.
    """

    def __init__(self, sources: Sources, exchanged: Collection[tuple[str, str]] = ()) -> None:
        self.sources = sources
        self._exchanged = exchanged
        self._scopes: dict[str, Scope] = {}
        self._members: dict[tuple[str, str], Denoted | None] = {}
        self._names: dict[tuple[Scope, str], Denoted | None] = {}

    def scope(self, module: Module) -> Scope:
        """The scope of a module."""
        if module.name not in self._scopes:
            self._scopes[module.name] = scope_of_module(module)
        return self._scopes[module.name]

    def member(self, module_name: str, name: str) -> Denoted | None:
        """What `module_name.name` denotes; None if it is a value."""
        key = module_name, name
        if key in self._exchanged:
            return Exchanged(name)
        if key not in self._members:
            self._members[key] = Missing(f"{module_name}.{name}")  # while it is looked for: modules import in circles
            self._members[key] = self._found_member(module_name, name)
        return self._members[key]

    def expression(self, node: ast.expr, scope: Scope) -> Denoted | None:
        """What an expression denotes; None if that is neither a class, a function nor a module."""
        match node:
            case ast.Name():
                return self._name(node.id, scope)
            case ast.Attribute():
                owner = self.expression(node.value, scope)
                return self._attribute(owner, node.attr)
            case ast.Subscript():
                return self.expression(node.value, scope)
            case ast.IfExp():
                return _first(self.expression(one, scope) for one in (node.body, node.orelse))
            case ast.BoolOp():
                return _first(self.expression(one, scope) for one in node.values)
            case ast.BinOp(op=ast.BitOr()):  # an annotation such as Trainer | None
                return _first(self.expression(one, scope) for one in (node.left, node.right))
            case _:
                return None

    def _found_member(self, module_name: str, name: str) -> Denoted | None:
        if is_closed(module_name):
            return None
        module = self.sources.module(module_name)
        if module is None:
            submodule = f"{module_name}.{name}"
            return ModuleName(submodule) if self.sources.exists(submodule) else Missing(submodule)
        scope = self.scope(module)
        if name in scope.bindings:
            return self._bound(name, scope)
        if name in scope.lazy:
            return self.member(scope.lazy[name], name)
        for star in scope.stars:
            found = self.member(star, name)
            if isinstance(found, ClassDefinition | FunctionDefinition | Exchanged):
                return found
        submodule = f"{module_name}.{name}"
        return ModuleName(submodule) if self.sources.exists(submodule) else Missing(submodule)

    def _name(self, name: str, scope: Scope) -> Denoted | None:
        found = scope.find(name)
        if found is not None:
            return self._bound(name, found[0])
        top = self.scope(scope.module)
        for star in top.stars:
            denoted = self.member(star, name)
            if denoted is not None and not isinstance(denoted, Missing):
                return denoted
        return None

    def _bound(self, name: str, scope: Scope) -> Denoted | None:
        """What a scope binds a name to: of several branches, the first that leads to something."""
        key = scope, name
        if key not in self._names:
            self._names[key] = None  # while it is looked for: a = b and b = a
            self._names[key] = _first(self._binding(one, name, scope) for one in list(scope.bindings[name]))
        return self._names[key]

    def _binding(self, binding: Imported | Value | Element | Defined, name: str, scope: Scope) -> Denoted | None:
        match binding:
            case Imported(module, None):
                return ModuleName(module)
            case Imported(module, str(member)):
                return self.member(module, member)
            case Defined(ast.ClassDef() as node):
                return ClassDefinition(scope.module, node, scope)
            case Defined(ast.FunctionDef() | ast.AsyncFunctionDef() as node):
                return FunctionDefinition(scope.module, node, scope)
            case Value(ast.Name(id=other)) if other == name:  # name = name
                return None if scope.parent is None else self._name(name, scope.parent)
            case Value(expression):
                return self.expression(expression, scope)
            case _:
                return None

    def _attribute(self, owner: Denoted | None, name: str) -> Denoted | None:
        match owner:
            case ModuleName(module):
                return self.member(module, name)
            case Missing(missing):
                return Missing(f"{missing}.{name}")
            case ClassDefinition(node=node):
                inner = next((one for one in node.body if isinstance(one, ast.ClassDef) and one.name == name), None)
                return None if inner is None else ClassDefinition(owner.module, inner, owner.scope)
            case _:
                return None


def _first(found: Iterator[Denoted | None]) -> Denoted | None:
    """The first that is in a source or exchanged; otherwise the first that is missing."""
    missing: Denoted | None = None
    for one in found:
        if one is not None and not isinstance(one, Missing):
            return one
        missing = missing or one
    return missing
