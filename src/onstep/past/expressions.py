"""Reads expressions over the metrics of a step, such as `grad_norm > 10`. They are parsed, never run as Python."""

from __future__ import annotations

import ast
import math
import operator
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from onstep.config.suggestions import shown
from onstep.errors import ConfigError

GRAMMAR = (
    "comparisons (<, <=, >, >=, ==, !=) of metrics and numbers, with + - * /, abs(), max(), min(), isnan(), and, or, "
    'not and parentheses; a metric\'s name may have dots and slashes, and others are quoted: "a-b" > 3'
)
_MOST_CHARACTERS = 1000
_NAME = re.compile(
    r"""(?P<quoted>"[^"]*"|'[^']*')|(?P<number>\d[\w.]*|\.\d[\w.]*)|(?P<name>[^\W\d]\w*(?:[./]\w+)*)""", re.ASCII
)
_WORDS = ("and", "or", "not", "abs", "max", "min", "isnan", "inf")
_COMPARISONS: dict[type[ast.cmpop], Callable[[float, float], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


def _quotient(one: float, other: float) -> float:
    if other:
        return one / other
    return math.nan if not one or math.isnan(one) else math.copysign(math.inf, one)


_ARITHMETIC: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _quotient,
}

Values = Mapping[str, float]
_Number = Callable[[Values], float]
_Truth = Callable[[Values], bool]


class MissingMetricError(KeyError):
    """A metric of the expression that a step does not have."""


@dataclass(frozen=True)
class Expression:
    """A condition on the metrics of a step."""

    text: str
    names: tuple[str, ...]
    """The metrics that it names, in their order; a quotient without spaces, `a/b`, is listed as one."""
    _holds: _Truth

    def holds(self, values: Values) -> bool:
        """Whether it holds for the metrics of a step; a comparison with NaN does not.

        Raises:
            MissingMetricError: if it depends on a metric that is not among them.
        """
        return self._holds(values)


def parse(text: str) -> Expression:
    """Read an expression.

    Raises:
        ConfigError: for anything else, with the position of the error and the grammar.
    """
    if len(text) > _MOST_CHARACTERS:
        raise ConfigError(f"an expression has at most {_MOST_CHARACTERS} characters, got {len(text)}.")
    return _Parser(re.sub(r"\s", " ", text).strip()).parse()


class _Parser:
    """Replaces names by plain words of the same length, so that places in the tree are places in the text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._names: dict[int, str] = {}
        self._source = _NAME.sub(self._plain, text)

    def parse(self) -> Expression:
        try:
            tree = ast.parse(self._source, mode="eval").body
        except SyntaxError as error:
            raise self._error(error.offset - 1 if error.offset else len(self._text), "is not an expression") from None
        except (ValueError, RecursionError, MemoryError):
            raise self._error(0, "is not an expression") from None
        holds = self._truth(tree)
        return Expression(self._text, tuple(dict.fromkeys(self._names.values())), holds)

    def _plain(self, match: re.Match[str]) -> str:
        text = match[0]
        if match["number"] or text in _WORDS:
            return text
        name = text[1:-1] if match["quoted"] else text
        self._names[match.start()] = name
        return "_" * len(text)

    def _error(self, at: int, why: str) -> ConfigError:
        rest = self._text[at : at + 20]
        place = f"at character {at + 1}, {shown(rest)}" if rest else "at its end"
        return ConfigError(f"--when {shown(self._text)} {why} ({place}); an expression has {GRAMMAR}.")

    def _at(self, node: ast.expr) -> int:
        """The place of a node in the text, whose characters before it may need several bytes."""
        return len(self._source.encode()[: node.col_offset].decode(errors="replace"))

    def _truth(self, node: ast.expr) -> _Truth:
        match node:
            case ast.BoolOp(op=op, values=parts):
                found = [self._truth(one) for one in parts]
                both = all if isinstance(op, ast.And) else any
                return lambda values: both(one(values) for one in found)
            case ast.UnaryOp(op=ast.Not(), operand=inner):
                one = self._truth(inner)
                return lambda values: not one(values)
            case ast.Compare(left=left, ops=ops, comparators=others):
                return self._comparison([left, *others], ops)
            case ast.Call(func=ast.Name(id="isnan"), args=[inner], keywords=[]):
                number = self._number(inner)
                return lambda values: math.isnan(number(values))
        raise self._error(self._at(node), "must compare something here")

    def _comparison(self, parts: Sequence[ast.expr], ops: Sequence[ast.cmpop]) -> _Truth:
        numbers, compare = [self._number(one) for one in parts], [_COMPARISONS[type(one)] for one in ops]

        def holds(values: Values) -> bool:
            found = [one(values) for one in numbers]
            return all(one(found[at], found[at + 1]) for at, one in enumerate(compare))

        return holds

    def _number(self, node: ast.expr) -> _Number:
        match node:
            case ast.Constant(value=bool()):
                pass
            case ast.Constant(value=int() | float() as value):
                if abs(value) > sys.float_info.max and value != math.inf:
                    raise self._error(self._at(node), "has a number here that is too large")
                number = float(value)
                return lambda values: number
            case ast.Name(id="inf"):
                return lambda values: math.inf
            case ast.Name() if self._at(node) in self._names:
                return _reader(self._names[self._at(node)])
            case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=inner):
                one = self._number(inner)
                return (lambda values: -one(values)) if isinstance(sign, ast.USub) else one
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                first, second, apply = self._number(left), self._number(right), _ARITHMETIC[type(op)]
                return lambda values: apply(first(values), second(values))
            case ast.Call(func=ast.Name(id="abs"), args=[inner], keywords=[]):
                one = self._number(inner)
                return lambda values: abs(one(values))
            case ast.Call(func=ast.Name(id="max" | "min" as name), args=[_, _, *_] as parts, keywords=[]):
                found, choose = [self._number(one) for one in parts], max if name == "max" else min
                return lambda values: choose(one(values) for one in found)
        raise self._error(self._at(node), "must have a metric or a number here")


def _reader(name: str) -> _Number:
    """What reads a metric; `a/b` is the metric of that name, else the quotient of a and b."""
    parts = name.split("/")

    def read(values: Values) -> float:
        if name in values:
            return float(values[name])
        if len(parts) > 1 and all(one in values or _is_number(one) for one in parts):
            found = [float(values[one]) if one in values else float(one) for one in parts]
            result = found[0]
            for other in found[1:]:
                result = _quotient(result, other)
            return result
        raise MissingMetricError(name)

    return read


def metrics_of_quotient(name: str) -> list[str]:
    """The metrics of a quotient such as `a/b/2`, without its numbers."""
    return [one for one in name.split("/") if not _is_number(one)]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
