"""The word list of `make lint`: finds translated phrases and riddles, and leaves good English and code alone."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Protocol

import pytest

Found = list[tuple[int, str]]


class Findings(Protocol):
    def __call__(self, text: str, name: str = ...) -> Found: ...


@pytest.fixture(scope="module")
def words() -> ModuleType:
    path = Path(__file__).parents[1] / "tools" / "words.py"
    spec = importlib.util.spec_from_file_location("words", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def found(words: ModuleType, tmp_path: Path) -> Findings:
    """Line and phrase of everything found in the text of a file."""

    def findings(text: str, name: str = "module.py") -> Found:
        path = tmp_path / name
        path.write_text(text, "utf-8")
        return [(line, phrase) for line, phrase, _ in words.findings(path)]

    return findings


def test_a_phrase_that_continues_on_the_next_line_is_found(found: Findings) -> None:
    assert found('"""Reads a log.\n\nA file that\nis\n    no log is refused.\n"""\n') == [(4, "is no")]


def test_comments_and_messages_are_read(found: Findings) -> None:
    assert found('x = 1  # mend this\nraise ValueError(f"{x} takes a number")\n') == [(1, "mend"), (2, "takes")]


def test_identifiers_are_not_read(found: Findings) -> None:
    assert found("def told(moment, folder):\n    takes = journal = moment\n    return takes\n") == []


@pytest.mark.parametrize("first", ["What a run is.", "How steps are counted.", "Who was first?", "Is it over?"])
def test_a_riddle_as_a_modules_docstring_is_found(found: Findings, first: str) -> None:
    assert found(f'"""{first}"""\n') == [(1, first)]


def test_a_riddle_is_only_looked_for_in_the_modules_docstring(found: Findings) -> None:
    assert found('"""Counts steps."""\n\n\ndef limit():\n    """How many steps."""\n') == []


@pytest.mark.parametrize(
    "text",
    [
        "There is no log in this directory.",
        "A directory.\n\n    There\n    is no log in it.\n    ",
        "The step is no longer than the limit.",
        "The second moment of Adam, and its moments.",
        "The report is in first-culprit-1.txt.",
        "TB stands for TensorBoard.",
        "It requires a GPU and accepts no other device.",
    ],
)
def test_good_english_passes(found: Findings, text: str) -> None:
    assert found(f'"""{text}"""\n') == []


@pytest.mark.parametrize(
    ("text", "phrases"),
    [
        ("It takes\na number.", [(1, "takes")]),
        ("Leave the flag away.", [(1, "Leave the flag away")]),
        ("`takes` is a name, told is not.", [(1, "told")]),
    ],
)
def test_a_page_is_read_without_its_inline_code(found: Findings, text: str, phrases: Found) -> None:
    assert found(text, "page.md") == phrases


def test_the_exit_status_says_whether_anything_was_found(
    words: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "good.md").write_text("There is no error here.\n")
    assert words.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == "0 found in 1 files.\n"

    (tmp_path / "bad.md").write_text("Fine.\nThis is no error.\n")
    assert words.main([str(tmp_path)]) == 1
    assert f"{tmp_path / 'bad.md'}:2: 'is no': rather is not a; there is no\n" in capsys.readouterr().out
