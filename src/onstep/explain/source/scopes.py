"""The names that a module or a function binds, and to what."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from onstep.explain.source.modules import Module

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Imported:
    """`import module`, or `from module import name`."""

    module: str
    name: str | None = None


@dataclass(frozen=True)
class Value:
    """`name = expression`."""

    expression: ast.expr


@dataclass(frozen=True)
class Element:
    """One of the names in `first, second = expression`, whose value is unknown."""


@dataclass(frozen=True)
class Defined:
    """`class name` or `def name`."""

    node: ast.ClassDef | Function


Binding = Imported | Value | Element | Defined


@dataclass(eq=False)
class Scope:
    """The bindings of a module or function, each name in the order of the source; branches count alike."""

    module: Module
    parent: Scope | None = None
    bindings: dict[str, list[Binding]] = field(default_factory=lambda: defaultdict(list))
    stars: list[str] = field(default_factory=list)
    """Modules of which all names are imported."""
    lazy: dict[str, str] = field(default_factory=dict)
    """Names that a package imports on first use, and their modules."""

    def find(self, name: str) -> tuple[Scope, list[Binding]] | None:
        """The nearest scope that binds a name."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.bindings:
                return scope, scope.bindings[name]
            scope = scope.parent
        return None


def scope_of_module(module: Module) -> Scope:
    """The scope of a module."""
    scope = Scope(module)
    for statement in statements(module.tree.body):
        _bind(scope, statement)
    scope.lazy = _lazy_names(module)
    return scope


def scope_of_function(node: Function, parent: Scope) -> Scope:
    """The scope of a function's body; parameters are not bound."""
    scope = Scope(parent.module, parent)
    for statement in statements(node.body):
        _bind(scope, statement)
    return scope


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements with those in their branches, not those in functions and classes."""
    for statement in body:
        yield statement
        if isinstance(statement, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        for part in ("body", "orelse", "finalbody"):
            yield from statements(getattr(statement, part, []))
        for handler in getattr(statement, "handlers", []):
            yield from statements(handler.body)
        for case in getattr(statement, "cases", []):
            yield from statements(case.body)


def _bind(scope: Scope, statement: ast.stmt) -> None:
    bindings = scope.bindings
    match statement:
        case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
            bindings[statement.name].append(Defined(statement))
        case ast.Import():
            for alias in statement.names:
                top = alias.name.partition(".")[0]
                bindings[alias.asname or top].append(Imported(alias.name if alias.asname else top))
        case ast.ImportFrom():
            module = scope.module.imported(statement)
            for alias in statement.names:
                if alias.name == "*":
                    scope.stars.append(module)
                else:
                    bindings[alias.asname or alias.name].append(Imported(module, alias.name))
        case ast.Assign():
            for target in statement.targets:
                _assign(bindings, target, statement.value)
        case ast.AnnAssign() if statement.value is not None:
            _assign(bindings, statement.target, statement.value)
        case _:
            pass


def _assign(bindings: dict[str, list[Binding]], target: ast.expr, value: ast.expr) -> None:
    if isinstance(target, ast.Name):
        bindings[target.id].append(Value(value))
    elif isinstance(target, (ast.Tuple, ast.List)):
        values = value.elts if isinstance(value, (ast.Tuple, ast.List)) else []
        for index, element in enumerate(target.elts):
            if isinstance(element, ast.Name):
                pairs = len(values) == len(target.elts)
                bindings[element.id].append(Value(values[index]) if pairs else Element())


def _lazy_names(module: Module) -> dict[str, str]:
    """The names that a package's table of imports gives: `{submodule: [name, ...]}`, as of transformers' `_LazyModule`,
    or `{name: submodule}`, of a module with `__getattr__`."""
    if not module.is_package or not ("LazyModule" in module.text or "__getattr__" in module.text):
        return {}
    names: dict[str, str] = {}
    for node in module.nodes:
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                names |= _rows(module, key, value)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
            names |= _rows(module, node.targets[0].slice, node.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            if node.func.attr in ("append", "extend") and isinstance(owner, ast.Subscript) and node.args:
                names |= _rows(module, owner.slice, node.args[0])
    return names


def _rows(module: Module, key: ast.expr | None, value: ast.expr) -> dict[str, str]:
    if not (isinstance(key, ast.Constant) and isinstance(key.value, str)):
        return {}
    texts = [one.value for one in ast.walk(value) if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    if isinstance(value, ast.List) or (isinstance(value, ast.Constant) and texts and not _is_module(texts[0])):
        return dict.fromkeys(texts, f"{module.name}.{key.value}")
    if texts and _is_module(texts[0]):
        home = texts[0]
        return {key.value: f"{module.name}{home}" if home.startswith(".") else home}
    return {}


def _is_module(text: str) -> bool:
    return "." in text and all(part.isidentifier() for part in text.strip(".").split("."))
