"""The kinds of objects whose attributes are looked at: a Trainer and what belongs to it."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from onstep.explain.source.classes import Classes
from onstep.explain.source.resolver import ClassDefinition, Denoted, Exchanged
from onstep.explain.source.scopes import Scope

KINDS = {
    "Trainer": "trainer",
    "Seq2SeqTrainer": "trainer",
    "TrainingArguments": "args",
    "Seq2SeqTrainingArguments": "args",
    "TrainerCallback": "callback",
    "DefaultFlowCallback": "callback",
    "ProgressCallback": "callback",
    "PrinterCallback": "callback",
    "EarlyStoppingCallback": "callback",
    "CallbackHandler": "callback_handler",
    "TrainerState": "state",
    "TrainerControl": "control",
}
"""Kind of the objects of each exchanged class."""

LEADS_TO: Mapping[str, Mapping[str, str]] = {
    "trainer": {
        "args": "args",
        "state": "state",
        "control": "control",
        "accelerator": "accelerator",
        "callback_handler": "callback_handler",
    },
    "accelerator": {"state": "accelerator.state", "gradient_state": "accelerator.gradient_state"},
    "args": {"accelerator_config": "args.accelerator_config", "distributed_state": "args.distributed_state"},
    "callback": {"trainer": "trainer"},
}
"""Attributes of a kind that are objects of a kind."""

_PARSED = ("parse_args_into_dataclasses", "parse_args_and_config", "parse_dict", "parse_json_file", "parse_yaml_file")


def kind_of_class(denoted: Denoted | None, classes: Classes) -> str | None:
    """The kind of a class's objects."""
    match denoted:
        case Exchanged(name):
            return KINDS.get(name)
        case ClassDefinition():
            roots = classes.of(denoted).roots
            return next((KINDS[root] for root in roots if root in KINDS), None)
        case _:
            return None


class Variables:
    """The kinds of the variables of a scope.

    Args:
        known: the kinds of variables of the scopes around it, and of parameters.
    """

    def __init__(self, scope: Scope, classes: Classes, known: Mapping[str, str]) -> None:
        self.scope = scope
        self.classes = classes
        self.known = dict(known)
        self._parsers: dict[str, list[str | None]] = {}

    def learn(self, statement: ast.stmt) -> None:
        """Take the kinds of what a statement assigns."""
        if not isinstance(statement, (ast.Assign, ast.AnnAssign)) or statement.value is None:
            return
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        for target in targets:
            if isinstance(target, ast.Name):
                self._take(target.id, self.kind(statement.value))
                if parsed := self._parsed_by(statement.value):
                    self._parsers[target.id] = parsed
            elif isinstance(target, (ast.Tuple, ast.List)):
                for element, kind in zip(target.elts, self._elements(statement.value), strict=False):
                    if isinstance(element, ast.Name):
                        self._take(element.id, kind)

    def kind(self, node: ast.expr) -> str | None:
        """The kind of an expression's value."""
        match node:
            case ast.Name():
                return self.known.get(node.id)
            case ast.Attribute():
                owner = self.kind(node.value)
                return None if owner is None else LEADS_TO.get(owner, {}).get(node.attr)
            case ast.Call():
                return kind_of_class(self.classes.resolver.expression(node.func, self.scope), self.classes)
            case ast.IfExp():
                return self.kind(node.body) or self.kind(node.orelse)
            case ast.BoolOp():
                return next((kind for one in node.values if (kind := self.kind(one))), None)
            case ast.NamedExpr():
                return self.kind(node.value)
            case _:
                return None

    def annotated(self, annotation: ast.expr | None) -> str | None:
        """The kind of a parameter with this annotation."""
        if annotation is None:
            return None
        if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value).endswith(("Optional", "Union")):
            parts = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
            return next((kind for one in parts if (kind := self.annotated(one))), None)
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            try:
                return self.annotated(ast.parse(annotation.value, mode="eval").body)
            except SyntaxError:
                return None
        if isinstance(annotation, ast.BinOp):
            return self.annotated(annotation.left) or self.annotated(annotation.right)
        return kind_of_class(self.classes.resolver.expression(annotation, self.scope), self.classes)

    def _take(self, name: str, kind: str | None) -> None:
        if kind is not None:
            self.known[name] = kind

    def _elements(self, value: ast.expr) -> list[str | None]:
        """The kinds of the elements of a tuple, or of what an `HfArgumentParser` returns."""
        if isinstance(value, (ast.Tuple, ast.List)):
            return [self.kind(one) for one in value.elts]
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in _PARSED:
            owner = value.func.value
            return self._parsers.get(owner.id, []) if isinstance(owner, ast.Name) else self._parsed_by(owner)
        return []

    def _parsed_by(self, value: ast.expr) -> list[str | None]:
        """The kinds of the dataclasses that a parser is created with."""
        if not (isinstance(value, ast.Call) and ast.unparse(value.func).endswith("Parser")):
            return []
        given = [*value.args[:1], *(one.value for one in value.keywords if one.arg == "dataclass_types")]
        types = given[0].elts if given and isinstance(given[0], (ast.Tuple, ast.List)) else given
        resolve = self.classes.resolver.expression
        return [kind_of_class(resolve(one, self.scope), self.classes) for one in types]
