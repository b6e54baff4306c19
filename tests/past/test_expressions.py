"""Expressions over metrics are parsed by a small grammar, and never run as Python."""

from __future__ import annotations

import math

import pytest

from onstep.errors import ConfigError
from onstep.past.expressions import MissingMetricError, parse

VALUES = {
    "loss": 2.0,
    "grad_norm": 12.0,
    "moe/load.1": 0.25,
    "grad_norm/layers.0.mlp.weight": 3.0,
    "a-b": 7.0,
    "nan": math.nan,
    "é": 1.0,
    "zero": 0.0,
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("grad_norm > 10", True),
        ("grad_norm>12", False),
        ("1 < loss <= 2.0 and not isnan(loss)", True),
        ("isnan(nan) or loss > 1e9", True),
        ("nan > 1 or nan <= 1", False),
        ("moe/load.1 == 0.25", True),
        ("grad_norm/layers.0.mlp.weight >= 3", True),
        ("grad_norm/loss == 6", True),
        ("loss/2/4 == .25", True),
        ("grad_norm / loss != 6", False),
        ("\"a-b\" == 7 and 'é' == 1", True),
        ("abs(-loss) + max(loss, 3, 1) * min(1, 2) - -1 == 6", True),
        ("(loss > 5 or grad_norm > 5) and loss < 3", True),
        ("loss / zero == inf and isnan(zero / zero)", True),
    ],
)
def test_an_expression_holds_or_not(text: str, expected: bool) -> None:
    assert parse(text).holds(VALUES) is expected


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("", "at its end"),
        ("loss >", "at its end"),
        ("loss", "character 1, 'loss'"),
        ("loss > 1 and grad_norm", "character 14, 'grad_norm'"),
        ("é > 1 and __import__('os')", "character 1"),
        ("loss > print(1)", "character 8, 'print(1)'"),
        ("loss > (lambda: 1)()", "character 15"),
        ("loss > [1][0]", "character 8, '[1][0]'"),
        ("loss > 'a' + 2 ** 3", "character 14"),
        ("loss in grad_norm", "character"),
        (" loss\n> 'é' + len(loss)", "character 14, 'len(loss)'"),
        ("max(loss) > 1", "character 1, 'max(loss) > 1'"),
        ("loss := 3", "character"),
        ("(" * 500 + "1" + ")" * 499, "character"),
        ("not " * 240 + "loss > 1)", "character"),
        ("loss + " + "9" * 400 + " > 1", "that is too large (at character 8"),
        ("loss > 1\x00", "is not an expression"),
        ("loss if loss > 1 else 2", "character"),
    ],
)
def test_anything_else_is_refused_with_its_place_and_the_grammar(text: str, place: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse(text)
    message = str(refusal.value)
    assert place in message
    assert "isnan()" in message
    assert "\n" not in message


def test_a_metric_that_a_step_does_not_have_is_named() -> None:
    expression = parse("loss > 1 and moe/x > 2")
    assert expression.names == ("loss", "moe/x")
    with pytest.raises(MissingMetricError, match="moe/x"):
        expression.holds(VALUES)
    assert not expression.holds({"loss": 0.0})
