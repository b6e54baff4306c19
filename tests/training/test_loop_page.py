"""The loop stays one page that reads as prose, a run stays small, and types say what they are."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_type_hints

import onstep.training
from onstep.training import GlobalState
from onstep.training.feature import Feature
from onstep.training.features import FEATURES
from onstep.training.run import Run

TRAINING = Path(onstep.training.__file__).parent
LOOP = TRAINING / "loop.py"
MOST_LEAVES = 50
"""Only ever lowered; 40 is the aim."""
ANY_PER_1000_LINES = 12
"""Only ever lowered; at most 12 is the aim."""


def tree() -> ast.Module:
    return ast.parse(LOOP.read_text(encoding="utf-8"))


def functions(module: ast.Module) -> Iterator[ast.FunctionDef]:
    yield from (node for node in ast.walk(module) if isinstance(node, ast.FunctionDef))


def imported(module: ast.Module) -> set[str]:
    """The modules that are imported, and those that may be meant by the names imported from them."""
    found: set[str] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def test_the_loop_has_at_most_150_lines() -> None:
    assert len(LOOP.read_text(encoding="utf-8").splitlines()) <= 150


def test_no_function_of_the_loop_is_above_30_lines() -> None:
    lengths = {one.name: (one.end_lineno or 0) - one.lineno + 1 for one in functions(tree())}
    assert len(lengths) >= 5
    assert {name: length for name, length in lengths.items() if length > 30} == {}


def test_the_loop_imports_no_feature_and_names_none() -> None:
    rooms = {kind.__module__ for kind in FEATURES} | {"onstep.training.features"}
    assert len(rooms) > 15
    assert not imported(tree()) & rooms
    bridge = "onstep.training.bridge"
    assert not [name for name in imported(tree()) if name.startswith(bridge)]
    words = set(re.findall(r"\w+", LOOP.read_text(encoding="utf-8").split('"""', 2)[2]))
    assert not words & {kind.__name__ for kind in FEATURES}


def test_no_other_file_of_the_layer_knows_the_rooms_of_features() -> None:
    """`__init__.py` only hands their public names on; Megatron Bridge's view on them is a room of its own."""
    rooms = {kind.__module__ for kind in FEATURES}
    knowing = {
        path.name
        for path in TRAINING.glob("*.py")
        if len(imported(ast.parse(path.read_text(encoding="utf-8"))) & rooms) > 3 and path.name != "__init__.py"
    }
    assert knowing - {"__init__.py"} == {"features.py"}, "the public names aside"


def leaves(kind: type) -> list[str]:
    """The fields of a dataclass and, in place of one that the training layer defines, those of it."""
    types, found = get_type_hints(kind), []
    for name in (field.name for field in fields(kind)):
        own = is_dataclass(types[name]) and types[name].__module__.startswith("onstep.training.")
        found += [f"{name}.{leaf}" for leaf in leaves(types[name])] if own else [name]
    return found


def test_a_run_stays_small_and_its_view_has_no_field_of_its_own() -> None:
    assert len(leaves(Run)) <= MOST_LEAVES, leaves(Run)
    assert [field.name for field in fields(GlobalState)] == [field.name for field in fields(Run)]


def test_few_lines_of_the_training_layer_say_any() -> None:
    lines = [line for path in TRAINING.rglob("*.py") for line in path.read_text(encoding="utf-8").splitlines()]
    untyped = sum(re.search(r"\bAny\b", line) is not None for line in lines)
    assert 1000 * untyped / len(lines) <= ANY_PER_1000_LINES, f"{untyped} of {len(lines)} lines"


def test_a_feature_is_described_where_it_is_defined() -> None:
    for kind in FEATURES:
        assert kind.__doc__
        assert kind.__doc__ != Feature.__doc__
        assert kind.when, kind.name
