"""What pytest-xdist's workers share: the compilation of the tests, and an order in which no long file comes last."""

from __future__ import annotations

import importlib
from contextlib import suppress
from itertools import chain, zip_longest
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LONG = ("process", "distributed", "faults")
"""Marks of tests that take seconds and mostly wait for other processes."""


def compile_a_share(config: pytest.Config) -> None:
    """Import every n-th file that is to be collected, so that its compiled form is there for the other workers.

    On a clean checkout half of the time of a collection goes into compiling assertions.
    """
    given = getattr(config, "workerinput", None)
    if given is None or config.args != config.getini("testpaths"):
        return
    files = sorted(path for folder in config.args for path in (ROOT / folder).rglob("test_*.py"))
    for file in files[int(given["workerid"].removeprefix("gw")) :: given["workercount"]]:
        with suppress(Exception, pytest.skip.Exception):  # the collection names it
            importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))


def mix(items: list[pytest.Item]) -> list[pytest.Item]:
    """The tests by file, each file that takes long beside one that does not, for as long as there are such files."""
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    long, short = [], []
    for tests in sorted(files.values(), key=len):
        (long if any(item.get_closest_marker(name) for item in tests for name in LONG) else short).append(tests)
    return list(chain.from_iterable(chain.from_iterable(zip_longest(long, reversed(short), fillvalue=[]))))
