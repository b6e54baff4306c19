"""The page of promises: each promise has tests, and the page is made from the results of a run."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support import results

pytest_plugins = ["pytester"]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def promises() -> ModuleType:
    spec = importlib.util.spec_from_file_location("promises", ROOT / "tools" / "promises.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["promises"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_promise_names_tests_that_exist_and_is_on_the_page(promises: ModuleType) -> None:
    page = (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")
    for promise in promises.PROMISES:
        assert promises.files_of(promise)
        assert f"**{promise.title}.**" in page


def test_the_page_in_the_repository_has_no_failure(promises: ModuleType) -> None:
    page = (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")
    assert not re.search(r"\d failed", page)


def test_a_pattern_without_a_test_file_is_an_error(promises: ModuleType) -> None:
    with pytest.raises(FileNotFoundError, match=r"tests/data/test_gone\.py, named for 'x', matches no test file"):
        promises.files_of(promises.Promise("x", "y", ("data/test_gone.py",)))


def test_the_page_has_the_counts_of_a_run_without_failures(
    promises: ModuleType, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makeconftest("from tests.support.results import register as pytest_configure")
    pytester.makepyfile(
        test_some="""
        import pytest

        @pytest.mark.parametrize("number", [1, 2])
        def test_counts(number, record_property):
            record_property("kills", number)

        def test_skipped():
            pytest.skip("no GPU")

        def test_failed():
            assert False

        @pytest.fixture
        def broken():
            yield
            raise RuntimeError

        def test_fails_at_its_end(broken):
            pass
        """
    )
    file = pytester.path / "results.json"
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(results.ENVIRONMENT, str(file))
        pytester.runpytest_inprocess("-p", "no:cacheprovider")
    content = json.loads(file.read_text())
    assert content["files"] == {"test_some.py": {"passed": 3, "skipped": 1, "failed": 2}}
    monkeypatch.setattr(promises, "PAGE", pytester.path / "promises.md")
    assert promises.main([str(file)]) == 1
    assert not promises.PAGE.exists(), "a page with failures must not be published"
    del content["files"]["test_some.py"]["failed"]
    file.write_text(json.dumps(content))
    assert promises.main([str(file)]) == 0
    page = promises.PAGE.read_text()
    assert "It ran 3 passed, 1 skipped." in page
    assert "### Counts\n\n`test_some.py`\n\n| Counted | |\n| --- | --- |\n| kills | 3 |" in page
