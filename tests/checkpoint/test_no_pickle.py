"""No source of ours unpickles, evaluates text or loads code from a file."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import onstep

SOURCE = Path(onstep.__file__).parent
MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "pickletools",
    "dill",
    "cloudpickle",
    "marshal",
    "shelve",
    "joblib",
    "jsonpickle",
}
CALLS = {"eval", "exec", "compile"}
RUNS_PROGRAMS = "cli/program.py"
"""Runs the user's own script, as Python does."""
ATTRIBUTES = {
    "torch.load",
    "torch.jit.load",
    "torch.package.PackageImporter",
    "yaml.load",
    "yaml.load_all",
    "yaml.unsafe_load",
    "yaml.full_load",
    "pandas.read_pickle",
    "torch.distributed.checkpoint.FileSystemReader",
}
NEEDS_FALSE = {"numpy.load", "numpy.lib.npyio.NpzFile"}


def imported_names(tree: ast.AST) -> dict[str, str]:
    """What each local name of a file stands for: `np` for numpy, `load` for torch.load."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def modules_of(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name.split(".")[0] for alias in node.names}
    if isinstance(node, ast.ImportFrom) and node.module:
        return {node.module.split(".")[0]}
    return set()


def full_name(node: ast.expr, names: dict[str, str]) -> str:
    """`torch.load` for the expression torch.load, whatever torch was imported as; empty for other expressions."""
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        return f"{full_name(node.value, names)}.{node.attr}"
    return ""


def allows_pickles(call: ast.Call) -> bool:
    """Whether numpy.load may unpickle: allow_pickle is anything but a literal False (its default)."""
    by_name = [word.value for word in call.keywords if word.arg in ("allow_pickle", None)]
    return any(not (isinstance(value, ast.Constant) and value.value is False) for value in [*by_name, *call.args[2:3]])


def findings(text: str) -> list[str]:
    """What a source does that the rule forbids, with the line."""
    tree = ast.parse(text)
    names = imported_names(tree)
    found = []
    for node in ast.walk(tree):
        found += [f"line {node.lineno}: imports {name}" for name in modules_of(node) & MODULES]  # type: ignore[attr-defined]
        if isinstance(node, ast.Name | ast.Attribute):
            name = full_name(node, names)
            if name in ATTRIBUTES:
                found.append(f"line {node.lineno}: uses {name}")
        if isinstance(node, ast.Call):
            name = full_name(node.func, names).removeprefix("builtins.")
            if name in CALLS:
                found.append(f"line {node.lineno}: calls {name}")
            if name in NEEDS_FALSE and allows_pickles(node):
                found.append(f"line {node.lineno}: {name} with allow_pickle")
            if any(word.arg == "weights_only" for word in node.keywords):
                found.append(f"line {node.lineno}: reads pickles with weights_only")
    return found


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "import pickle as p",
        "from pickle import loads",
        "def f():\n    import cloudpickle",
        "import marshal, json",
        "import torch\ntorch.load('x')",
        "import torch as t\nt.load('x', weights_only=True)",
        "from torch import load\nload('x')",
        "from torch import load as get\nread = get",
        "import functools, torch\nread = functools.partial(torch.load, weights_only=False)",
        "import torch\ntorch.jit.load('x')",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "import numpy as np\nnp.load('x', None, True)",
        "import numpy as np\nnp.load('x', **options)",
        "eval('1')",
        "import builtins\nbuiltins.exec('1')",
        "import yaml\nyaml.load(text)",
        "import yaml\nyaml.unsafe_load(text)",
        "from yaml import unsafe_load as u\nu(text)",
    ],
)
def test_the_walk_finds_what_is_forbidden(text: str) -> None:
    assert findings(text)


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch.distributed.all_gather_object(a, b)",
        "import numpy as np\nnp.load('x')",
        "import numpy as np\nnp.load('x', allow_pickle=False)",
        "import json\njson.load(file)",
        "import yaml\nyaml.safe_load(text)",
        "model.eval()",
        "import re\nre.compile('x')",
        "import torch\ntorch.compile(model)",
    ],
)
def test_the_walk_lets_pass_what_is_allowed(text: str) -> None:
    assert findings(text) == []


def test_no_source_of_ours_reads_pickles_or_runs_text() -> None:
    sources = sorted(SOURCE.rglob("*.py"))
    assert len(sources) > 100
    found = [
        f"{path.relative_to(SOURCE)} {finding}" for path in sources for finding in findings(path.read_text("utf-8"))
    ]
    found = [one for one in found if not re.fullmatch(rf"{RUNS_PROGRAMS} line \d+: calls (exec|compile)", one)]
    assert found == []
