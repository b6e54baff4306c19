"""Finds what code reads, sets and passes of a Trainer, its arguments, state, control, accelerator and callbacks."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass

from onstep.explain.source.classes import Classes, ClassInfo, receiver_of
from onstep.explain.source.kinds import KINDS, Variables
from onstep.explain.source.modules import Module
from onstep.explain.source.resolver import ClassDefinition, Exchanged, ModuleName
from onstep.explain.source.scopes import Function, scope_of_function, statements

_BY_NAME = {"training_args": "args"}
"""Parameters whose kind their name says, in code that doesn't annotate them."""
_OF_EVENTS = ("args", "state", "control")


@dataclass(frozen=True)
class Use:
    """One use of an attribute.

    Args:
        kind: of the object, as in `kinds.KINDS`.
        name: of the attribute; or of a keyword, of what is passed.
        verb: read, set, super (read of the base class) or pass (a keyword of its constructor).
        owner: the class whose method it is in; None for a function.
        on_self: whether the object is the method's own.
    """

    kind: str
    name: str
    verb: str
    module: Module
    line: int
    owner: ClassInfo | None = None
    on_self: bool = False


@dataclass(frozen=True)
class Patch:
    """An assignment to an attribute of a class, or of a module of transformers.

    Args:
        target: the exchanged class, the class in a source, or the module.
        name: of the attribute.
        reads_source: whether the source of that method is read, to compile a changed one, and nothing is assigned.
    """

    target: Exchanged | ClassDefinition | ModuleName
    name: str
    module: Module
    line: int
    reads_source: bool = False


@dataclass(frozen=True)
class _Place:
    module: Module
    owner: ClassInfo | None
    receiver: str | None
    kind: str | None


class UsesOfModule:
    """Walks a module once.

    Args:
        kinds: the kind of each class in the module that is one of a Trainer, by node; of mixins, too.
    """

    def __init__(self, module: Module, classes: Classes, kinds: Mapping[ast.ClassDef, str]) -> None:
        self.module = module
        self.classes = classes
        self.kinds = kinds
        self.uses: list[Use] = []
        self.patches: list[Patch] = []
        scope = classes.resolver.scope(module)
        self._block(module.tree.body, Variables(scope, classes, {}), _Place(module, None, None, None))

    def _block(self, body: list[ast.stmt], variables: Variables, place: _Place) -> None:
        for statement in statements(body):
            variables.learn(statement)
        for statement in body:
            self._visit(statement, variables, place)

    def _visit(self, node: ast.AST, variables: Variables, place: _Place) -> None:
        match node:
            case ast.ClassDef():
                self._class(node, variables)
                return
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._function(node, variables, place)
                return
            case ast.Attribute():
                self._attribute(node, variables, place)
            case ast.Call():
                self._call(node, variables, place)
            case _:
                pass
        for child in ast.iter_child_nodes(node):
            self._visit(child, variables, place)

    def _class(self, node: ast.ClassDef, variables: Variables) -> None:
        info = self.classes.of(ClassDefinition(self.module, node, variables.scope))
        kind = self.kinds.get(node)
        for statement in statements(node.body):
            if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
                place = _Place(self.module, info, receiver_of(statement), kind)
                self._function(statement, variables, place, is_method=True)
            elif isinstance(statement, ast.ClassDef):
                self._class(statement, variables)

    def _function(self, node: Function, outer: Variables, place: _Place, is_method: bool = False) -> None:
        for decorator in node.decorator_list:
            self._visit(decorator, outer, place)
        scope = scope_of_function(node, outer.scope)
        parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        hidden = {one.arg for one in parameters}
        known = {name: kind for name, kind in outer.known.items() if name not in hidden}
        variables = Variables(scope, self.classes, known)
        for parameter in parameters:
            kind = variables.annotated(parameter.annotation)
            if kind is None and parameter.annotation is None:
                kind = _BY_NAME.get(parameter.arg)
                if kind is None and is_method and place.kind == "trainer" and parameter.arg == "args":
                    kind = "args"
            if kind is not None:
                variables.known[parameter.arg] = kind
        if is_method and place.kind is not None and place.receiver is not None:
            variables.known[place.receiver] = place.kind
            if place.kind == "callback" and node.name.startswith("on_"):
                positional = [one.arg for one in node.args.args[1:4]]
                variables.known |= dict(zip(positional, _OF_EVENTS, strict=False))
        self._block(node.body, variables, place)

    def _attribute(self, node: ast.Attribute, variables: Variables, place: _Place) -> None:
        if _is_super(node.value) and place.kind is not None:
            self._add(place.kind, node.attr, "super", node, place, on_self=True)
            return
        verb = "read" if isinstance(node.ctx, ast.Load) else "set"
        kind = variables.kind(node.value)
        if kind is not None:
            on_self = isinstance(node.value, ast.Name) and node.value.id == place.receiver
            self._add(kind, node.attr, verb, node, place, on_self)
        elif verb == "set":
            self._patch(node.value, node.attr, node.lineno, variables)

    def _call(self, node: ast.Call, variables: Variables, place: _Place) -> None:
        name = node.func.id if isinstance(node.func, ast.Name) else None
        if name in ("getattr", "hasattr", "setattr", "delattr") and len(node.args) > 1:
            attribute = node.args[1]
            if isinstance(attribute, ast.Constant) and isinstance(attribute.value, str):
                self._by_name(str(name), node, attribute.value, variables, place)
        match node:
            case ast.Call(func=ast.Attribute(attr="getsource"), args=[ast.Attribute(value=owner, attr=method)]):
                self._patch(owner, method, node.lineno, variables, reads_source=True)
            case _:
                pass
        kind = self._constructed(node, variables, place)
        if kind is not None:
            for keyword in node.keywords:
                if keyword.arg is not None:
                    self._add(kind, keyword.arg, "pass", node, place)

    def _by_name(self, function: str, node: ast.Call, name: str, variables: Variables, place: _Place) -> None:
        """`getattr(self.args, "name", default)`: with a default, or asked for by hasattr, it needs not exist."""
        kind = variables.kind(node.args[0])
        if function == "setattr":
            if kind is not None:
                self._add(kind, name, "set", node, place, _is_name(node.args[0], place.receiver))
            else:
                self._patch(node.args[0], name, node.lineno, variables)
        elif kind is not None and function == "getattr" and len(node.args) == 2:
            self._add(kind, name, "read", node, place, _is_name(node.args[0], place.receiver))
        elif kind is not None and function in ("getattr", "hasattr"):
            self._add(kind, name, "ask", node, place, _is_name(node.args[0], place.receiver))

    def _constructed(self, node: ast.Call, variables: Variables, place: _Place) -> str | None:
        """The kind that a call constructs with Onstep's constructor itself."""
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr == "__init__" and _is_super(function.value):
            own = place.owner is not None and any("__init__" in one.defined for one in place.owner.chain()[1:])
            return None if own or place.kind is None else f"{place.kind}("
        match self.classes.resolver.expression(function, variables.scope):
            case Exchanged(name):
                return f"{KINDS[name]}(" if name in KINDS else None
            case _:
                return None

    def _patch(
        self, target: ast.expr, name: str, line: int, variables: Variables, *, reads_source: bool = False
    ) -> None:
        match self.classes.resolver.expression(target, variables.scope):
            case Exchanged() | ClassDefinition() | ModuleName() as denoted:
                self.patches.append(Patch(denoted, name, self.module, line, reads_source))
            case None if isinstance(target, ast.Name) and target.id in KINDS:  # a parameter of that name
                self.patches.append(Patch(Exchanged(target.id), name, self.module, line, reads_source))
            case _:
                pass

    def _add(self, kind: str, name: str, verb: str, node: ast.expr, place: _Place, on_self: bool = False) -> None:
        self.uses.append(Use(kind, name, verb, self.module, node.lineno, place.owner, on_self))


def _is_super(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"


def _is_name(node: ast.expr, name: str | None) -> bool:
    return isinstance(node, ast.Name) and node.id == name
