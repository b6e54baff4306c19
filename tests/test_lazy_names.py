"""The public names of a package are known without loading the modules that have them."""

from __future__ import annotations

import importlib
import py_compile
from pathlib import Path

import pytest

import onstep

PACKAGE = """
from typing import TYPE_CHECKING

from onstep.lazy_names import lazy_names

if TYPE_CHECKING:
    from os.path import basename, dirname as directory_of
    from json import dumps

__all__ = ["basename", "dirname", "dumps"]

__getattr__, __dir__ = lazy_names(__name__)
"""


@pytest.mark.parametrize("has_source", [True, False])
def test_a_package_knows_its_names_also_without_its_source(
    has_source: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / f"lazily_named_{has_source}.py"
    source.write_text(PACKAGE)
    if not has_source:
        py_compile.compile(str(source), cfile=str(source.with_suffix(".pyc")))
        source.unlink()
    monkeypatch.syspath_prepend(tmp_path)
    package = importlib.import_module(f"lazily_named_{has_source}")
    assert dir(package) == ["basename", "dirname", "dumps"]
    assert package.basename("a/b") == "b"
    assert package.dumps([]) == "[]"
    assert not hasattr(package, "other")


def test_all_names_of_onstep_are_there() -> None:
    assert dir(onstep) == sorted(onstep.__all__)
    for name in onstep.__all__:
        assert getattr(onstep, name) is not None
