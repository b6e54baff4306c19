"""The ancestors of a class in a source, and the names that it defines and sets."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from onstep.explain.source.resolver import ClassDefinition, Denoted, Exchanged, Missing, Resolver
from onstep.explain.source.scopes import Function, statements


@dataclass(frozen=True)
class Member:
    """A name that a class defines or sets on itself.

    Args:
        line: where.
        is_method: whether it is a function, and not a property.
        is_settable: False for a property without a setter.
    """

    name: str
    line: int
    is_method: bool = False
    is_settable: bool = True


@dataclass(eq=False)
class ClassInfo:
    """A class with its ancestors.

    Args:
        definition: where it is.
        bases: those in sources.
        roots: the exchanged classes that it derives from.
        missing: bases that were not found.
    """

    definition: ClassDefinition
    bases: list[ClassInfo] = field(default_factory=list)
    roots: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Its full name."""
        return self.definition.full_name

    @cached_property
    def defined(self) -> dict[str, Member]:
        """What its body defines."""
        return {member.name: member for member in _defined(self.definition.node.body)}

    @cached_property
    def assigned(self) -> dict[str, Member]:
        """What its methods set on the object, by name; the first place of each."""
        members: dict[str, Member] = {}
        for method in methods(self.definition.node):
            receiver = receiver_of(method)
            for name, line in assignments(method, receiver) if receiver else ():
                members.setdefault(name, Member(name, line))
        return members

    def chain(self) -> list[ClassInfo]:
        """It and its ancestors in sources, nearest first."""
        seen: dict[str, ClassInfo] = {}
        waiting = [self]
        while waiting:
            one = waiting.pop(0)
            if one.name not in seen:
                seen[one.name] = one
                waiting += one.bases
        return list(seen.values())


class Classes:
    """The classes of a resolver's sources, each once."""

    def __init__(self, resolver: Resolver) -> None:
        self.resolver = resolver
        self._known: dict[int, ClassInfo] = {}

    def of(self, definition: ClassDefinition) -> ClassInfo:
        """A class with its ancestors."""
        key = id(definition.node)
        if key not in self._known:
            info = self._known[key] = ClassInfo(definition)
            for base in definition.node.bases:
                self._add(info, self.resolver.expression(base, definition.scope), base)
        return self._known[key]

    def _add(self, info: ClassInfo, denoted: Denoted | None, base: ast.expr) -> None:
        match denoted:
            case Exchanged(name):
                _extend(info.roots, [name])
            case ClassDefinition():
                parent = self.of(denoted)
                info.bases.append(parent)
                _extend(info.roots, parent.roots)
                _extend(info.missing, parent.missing)
            case Missing(name):
                _extend(info.missing, [name])
            case _:
                if not isinstance(base, ast.Name) or base.id not in ("object", "Exception"):
                    _extend(info.missing, [ast.unparse(base)])


def _extend(names: list[str], more: list[str]) -> None:
    names += [name for name in more if name not in names]


def methods(node: ast.ClassDef) -> Iterator[Function]:
    """The functions in a class's body."""
    for statement in statements(node.body):
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield statement


def receiver_of(method: Function) -> str | None:
    """The name of `self` in a method; None in a static one."""
    decorators = {ast.unparse(one).rpartition(".")[2] for one in method.decorator_list}
    arguments = [*method.args.posonlyargs, *method.args.args]
    return arguments[0].arg if arguments and "staticmethod" not in decorators else None


def assignments(node: ast.AST, receiver: str) -> Iterator[tuple[str, int]]:
    """Attributes that code sets on a variable: name and line."""
    for one in ast.walk(node):
        match one:
            case ast.Attribute(value=ast.Name(id=owner), attr=name, ctx=ast.Store()) if owner == receiver:
                yield name, one.lineno
            case ast.Call(func=ast.Name("setattr"), args=[ast.Name(id=owner), ast.Constant(str(name)), _]):
                if owner == receiver:
                    yield name, one.lineno
            case _:
                pass


def _defined(body: list[ast.stmt]) -> Iterator[Member]:
    for statement in statements(body):
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield _method(statement, body)
            case ast.ClassDef():
                yield Member(statement.name, statement.lineno)
            case ast.ImportFrom():  # functions as methods
                for alias in statement.names:
                    yield Member(alias.asname or alias.name, statement.lineno, is_method=True)
            case ast.Assign():
                for target in statement.targets:
                    for name in ast.walk(target):
                        if isinstance(name, ast.Name):
                            yield Member(name.id, statement.lineno)
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield Member(name, statement.lineno)
            case _:
                pass


def _method(node: Function, body: list[ast.stmt]) -> Member:
    decorators = [ast.unparse(one) for one in node.decorator_list]
    is_property = any(text.rpartition(".")[2] in ("property", "cached_property") for text in decorators)
    is_setter = f"{node.name}.setter" in decorators
    settable = not any(text == "property" for text in decorators) or is_setter
    return Member(node.name, node.lineno, is_method=not (is_property or is_setter), is_settable=settable)
