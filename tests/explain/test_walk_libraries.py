"""The page of libraries: its tables agree with the code, and the tool that writes them reads wheels."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from onstep.explain.outcomes import Outcomes
from onstep.trainer.overrides import METHODS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/coming-from/libraries.md"


@pytest.fixture
def tool() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("walk_libraries", ROOT / "tools/walk_libraries.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def rows(part: str) -> list[list[str]]:
    """The rows of a table of the page, without its head."""
    text = PAGE.read_text(encoding="utf-8").partition(f"<!-- walked: {part} -->")[2].partition("<!--")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.strip().splitlines()[2:]]


def test_the_page_says_of_each_override_what_the_table_of_methods_says() -> None:
    outcomes = Outcomes()
    words = {"honoured": "honoured", "refused": "refused", "never": "never called"}
    for name, word, why, _ in rows("others"):
        outcome = outcomes.override("trainer", name.strip("`"))
        assert outcome is not None
        assert (word, why) == (words[outcome.name], ": ".join(filter(None, (outcome.when, outcome.instead)))), name
    assigned = [row for row in rows("assign") if re.match(r"`\w*Trainer\.(?!__init__)\w+`$", row[0])]
    assert len(assigned) > 20
    for name, word, why, _ in assigned:
        method = METHODS[name.strip("`").partition(".")[2]]
        expected = [method.called] if method.called else [method.refused, method.instead, method.unneeded]
        assert why == ": ".join(filter(None, expected)), name
        assert (word == "honoured") == bool(method.called), name


def test_at_least_95_percent_are_honoured_and_nothing_is_missing() -> None:
    *libraries, total, once = rows("counts")
    assert len(libraries) == 10
    for _, _, overrides, honoured, _, _, missing, _, attributes, there, _, absent, _ in (total, once):
        assert int(missing) == int(absent) == 0
        assert int(honoured) >= 0.95 * int(overrides)
        assert int(there) >= 0.95 * int(attributes)


def test_the_tool_reads_wheels_and_writes_the_tables(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with zipfile.ZipFile(tmp_path / "made_up-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("made_up/__init__.py", "from .trainer import Mine\n")
        wheel.writestr(
            "made_up/trainer.py",
            "from transformers import Trainer\nclass Mine(Trainer):\n"
            "    def log(self, logs): return self.args.seed\n    def _run_epoch(self): ...\n",
        )
    page = tmp_path / "page.md"
    page.write_text("transformers 1.2.3 and accelerate\n" + PAGE.read_text(encoding="utf-8").partition("\n")[2])
    monkeypatch.setattr(tool, "PAGE", page)
    monkeypatch.setattr(tool, "LIBRARIES", (tool.Library("Made up", "made-up", "1.0", "made_up"),))
    monkeypatch.setattr(sys, "argv", ["walk", "--wheels", str(tmp_path)])
    assert tool.main() == 0
    text = page.read_text()
    assert "| Made up 1.0 | 1 | 2 | 1 | 1 | 0 | 0 | 50.0 % | 2 | 2 | 0 | 0 | 100.0 % |" in text
    assert f"| `_run_epoch` | refused | {METHODS['_run_epoch'].refused}: " in text
    assert "transformers 5." in text.partition("\n")[0]
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--check"])
    assert tool.main() == 0
    page.write_text(text.replace("50.0 %", "60.0 %"))
    assert tool.main() == 1
    assert "Made up" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif("ONSTEP_WHEELS" not in os.environ, reason="ONSTEP_WHEELS names a directory with the wheels")
def test_the_page_is_what_the_walk_of_the_wheels_gives(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["walk", "--check", "--wheels", os.environ["ONSTEP_WHEELS"]])
    assert tool.main() == 0
