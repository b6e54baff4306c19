"""`onstep run --explain`: what it prints."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from onstep.cli.main import main

SCRIPT = """
from transformers import Trainer, TrainingArguments
from library import Base
raise SystemExit("the script was run")
class Mine(Base):
    def compute_loss(self, model, inputs): return self.args.seed
    def _run_epoch(self): ...
args: TrainingArguments
"""
LIBRARY = """
from transformers import Trainer
class Base(Trainer):
    def evaluate(self): ...
    def _rotate_checkpoints(self): ...
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "library.py").write_text(LIBRARY)
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path / "script.py"


def test_the_report_lists_each_class_with_its_overrides(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--explain", str(script)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert "transformers.trainer: Trainer" in text
    assert "Mine (script.py:5), a Trainer\n  honoured      compute_loss: for each micro-batch (line 6)" in text
    assert "  refused       _run_epoch: in every training: override training_step" in text
    assert "library.Base (library.py:3), a Trainer\n  1 of 2 overrides honoured\n" in text
    assert text.endswith(
        "In all: 2 of 4 overrides honoured, 2 refused, 0 never called, 0 missing; 2 of 2\n"
        "attributes are there, 0 refused, 0 missing."
    )


def test_json_has_every_row(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--explain", "--json", str(script), "--its-own", "option"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {row["name"]: row["outcome"] for row in found["overrides"]} == {
        "compute_loss": "honoured",
        "_run_epoch": "refused",
        "evaluate": "honoured",
        "_rotate_checkpoints": "refused",
    }
    assert {row["name"] for row in found["attributes"]} == {"trainer.args", "args.seed"}
    assert found["exchanged"]["transformers.trainer"] == ["Trainer"]


def test_a_module_is_explained_too(
    script: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(script.parent)
    assert main(["run", "--explain", "-m", "library"]) == 0
    assert "library.Base (library.py:3), a Trainer" in capsys.readouterr().out


def test_a_directory_is_explained_by_its_main_module(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.rename(script.with_name("__main__.py"))
    assert main(["run", "--explain", str(script.parent)]) == 0
    assert "Mine (__main__.py:5), a Trainer" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--explain", "-m", "no.such.module"], "there is no module no.such.module"),
        (["--json", "script.py"], "--json belongs to --explain"),
        (["--explain", "broken.py"], "broken.py must be a readable Python file: invalid syntax (broken.py, line 1);"),
        (["--explain", "empty"], "empty: the directory has no __main__.py"),
        (["--explain", "-m", "whole"], "there is no module whole to run with a readable source"),
        (["--explain", "script.zip"], "script.zip is an archive, whose modules are not read; unpack it"),
    ],
)
def test_what_cannot_be_explained_is_refused(
    script: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.chdir(script.parent)
    (script.parent / "broken.py").write_text("class (")
    (script.parent / "empty").mkdir()
    (script.parent / "whole").mkdir()
    (script.parent / "whole" / "__init__.py").touch()
    with zipfile.ZipFile(script.parent / "script.zip", "w") as archive:
        archive.write(script, "__main__.py")
    assert main(["run", *words]) == 1
    assert message in capsys.readouterr().err


def test_neither_torch_nor_transformers_is_imported(script: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from onstep.explain.explaining import explain_script; "
        "assert explain_script(Path('script.py')).classes; "
        "raise SystemExit(bool({'torch', 'transformers', 'library'} & sys.modules.keys()))"
    )
    subprocess.run([sys.executable, "-c", code], cwd=script.parent, check=True)
