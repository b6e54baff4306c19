"""Shell completion, as the scripts of the shells ask for it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from onstep.cli import main as command_line
from onstep.cli.main import COMMANDS, main
from tests.support.steered_job import steered_job

Complete = Callable[..., list[str]]


@pytest.fixture
def complete(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Complete:
    """What bash would offer for the last word."""
    monkeypatch.setenv("ONSTEP_REGISTRY", str(tmp_path))

    def completions(*words: str) -> list[str]:
        monkeypatch.setenv("_ONSTEP_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", " ".join(["onstep", *words]))
        monkeypatch.setenv("COMP_CWORD", str(len(words)))
        assert main([]) == 0
        return capsys.readouterr().out.split()

    return completions


def test_commands_are_completed(complete: Complete) -> None:
    assert complete("con") == ["config", "control"]
    assert complete("") == list(COMMANDS)


def test_commands_of_a_group_are_completed(complete: Complete) -> None:
    assert complete("control", "s") == ["status", "save", "skip", "set", "stacks", "stop", "save-stop", "send"]
    assert complete("logs", "re") == ["report", "replay"]


def test_options_are_completed(complete: Complete) -> None:
    assert complete("control", "rollback", "--st") == ["--step"]
    assert complete("logs", "tail", "--f") == ["--follow"]
    assert complete("--inst") == ["--install-completion"]


def test_running_jobs_are_completed(complete: Complete) -> None:
    assert complete("control", "pause", "") == []
    with steered_job("job_a"), steered_job("other"):
        assert complete("control", "pause", "j") == ["job_a"]
        assert sorted(complete("control", "set", "")) == ["job_a", "other"]


def test_a_command_that_does_not_exist_has_no_completions(complete: Complete) -> None:
    assert complete("nonsense", "x") == []


def test_listing_the_commands_imports_none_of_them() -> None:
    code = (
        "import sys; from onstep.cli.main import main; main([]);"
        "sys.exit(bool({'torch', 'numpy', 'omegaconf', 'onstep.cli.train', 'onstep.cli.control'} & set(sys.modules)))"
    )
    environment = {**os.environ, "_ONSTEP_COMPLETE": "complete_bash", "COMP_WORDS": "onstep tr", "COMP_CWORD": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "train\n", "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_for_a_shell_is_shown_and_installed(
    shell: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["--show-completion", shell]) == 0
    script = capsys.readouterr().out
    assert "_ONSTEP_COMPLETE" in script
    assert main(["--install-completion", shell]) == 0
    path = capsys.readouterr().out.split(" is installed in ")[1].split(";")[0]
    assert Path(path).read_text().strip() == script.strip()
    assert Path(path).is_relative_to(tmp_path)


def test_an_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--show-completion", "tcsh"]) == 1
    assert "must be followed by one of bash, zsh, fish, got tcsh" in capsys.readouterr().err


def test_the_overview_names_the_option() -> None:
    assert "--install-completion" in command_line.overview()


@pytest.mark.process
def test_bash_completes_with_the_installed_script(tmp_path: Path) -> None:
    environment = {**os.environ, "HOME": str(tmp_path), "ONSTEP_REGISTRY": str(tmp_path)}
    program = tmp_path / "onstep"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m onstep "$@"\n')
    program.chmod(0o755)
    script = (
        f'PATH={tmp_path}:$PATH; eval "$(onstep --show-completion bash)"\n'
        "COMP_WORDS=(onstep control ev); COMP_CWORD=2; _onstep_completion onstep; echo ${COMPREPLY[@]}"
    )
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("evaluate\n", "")
