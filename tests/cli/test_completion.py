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
from onstep.config import KEYS
from onstep.recipes import RECIPES
from tests.support.pseudo_terminal import read_terminal
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


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory with two runs, a configuration file and a directory."""
    for name in ("alpha/checkpoints/checkpoint-20", "alpha/checkpoints/checkpoint-40", "beta"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    for name in ("alpha", "beta"):
        (tmp_path / "runs" / name / "run.json").write_text("{}")
    (tmp_path / "alphabet.yaml").touch()
    (tmp_path / "almanac").mkdir()
    monkeypatch.chdir(tmp_path)


def test_keys_are_completed_by_section(complete: Complete) -> None:
    keys = [key for key in KEYS if key.startswith("optimizer.")]
    assert complete("train", "optim") == [f"{key}=" for key in keys]
    assert complete("config", "explain", "optim") == keys
    assert complete("train", "optimizer.weight_d") == ["optimizer.weight_decay="]
    sections = complete("verify-resume", "")
    assert {"optimizer.", "train.", "mixed_precision="} <= set(sections)
    assert "optimizer.lr=" not in sections


def test_values_are_completed_after_the_sign_that_bash_holds_for_a_word(complete: Complete) -> None:
    choices = list(KEYS["optimizer.optimizer"].option.choices)
    assert complete("train", "optimizer.optimizer", "=") == choices
    assert complete("train", "optimizer.optimizer", "=", "ad") == [one for one in choices if one.startswith("ad")]
    assert complete("train", "a", "=", "1", "logger.tensorboard_log", "=", "x") == []
    assert complete("fork", "x@3", "run.recipe", "=", "tiny_m")[0] == "tiny_moe"
    assert complete("train", "optimizer.optimizer=mu") == ["optimizer.optimizer=muon"], "a shell without these signs"


@pytest.mark.usefixtures("runs")
def test_runs_recipes_checkpoints_and_files_are_completed(complete: Complete) -> None:
    assert complete("train", "al") == ["alphabet.yaml", "almanac/", "alpha"]
    assert complete("memory", "tiny_m") == [name for name in RECIPES if name.startswith("tiny_m")]
    assert complete("train", "--recipe", "llama32_1b_finetune_") == ["llama32_1b_finetune_lora"]
    assert complete("train", "checkpoint.load", "=") == ["alpha", "beta"]
    assert complete("checkpoint", "verify", "alpha@") == ["alpha@40", "alpha@20"]
    assert complete("fork", "b") == ["beta@"]


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize(
    "command",
    ["train", "finetune", "generate", "chat", "config show", "memory", "why", "rewind", "checkpoint list",
     "checkpoint export", "logs summary", "logs tail", "logs plot", "logs compare", "logs report", "logs replay",
     "dashboard", "evaluate", "plot heatmap", "verify-resume"],
)  # fmt: skip
def test_each_command_that_takes_a_run_completes_its_name(command: str, complete: Complete) -> None:
    assert complete(*command.split(), "bet") == ["beta"]


def ask(shell: str, typed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What the script of zsh or fish gets as the completion of a command line."""
    asked = {"_ONSTEP_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": typed}
    for name, value in {**asked, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}.items():
        monkeypatch.setenv(name, value)
    assert main([]) == 0
    return capsys.readouterr().out


def test_fish_shows_the_help_of_a_key(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rows = ask("fish", "onstep train optimizer.", monkeypatch, capsys).splitlines()
    assert [row.partition("\t")[0] for row in rows] == [f"{key}=" for key in KEYS if key.startswith("optimizer.")]
    assert "optimizer.weight_decay=\tDecoupled weight decay of matrices; vectors are not decayed." in rows


def test_zsh_sets_no_blank_after_a_key(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask("zsh", "onstep train optimizer.weight", monkeypatch, capsys).splitlines() == [
        "local -a ends; ends=();",
        "local -a goes_on; goes_on=('optimizer.weight_decay=:Decoupled weight decay of matrices; vectors are not "
        "decayed.');",
        "_describe word ends -- goes_on -S ''",
    ]
    ends = ask("zsh", "onstep train optimizer.optimizer=mu", monkeypatch, capsys).splitlines()[0]
    assert ends == "local -a ends; ends=(optimizer.optimizer=muon);"
    assert ask("zsh", "onstep train dataset.path=x", monkeypatch, capsys) == "compset -P '*='; _files\n"


def test_completing_words_does_not_import_torch(tmp_path: Path) -> None:
    code = """
import os, sys
from onstep.cli.main import main
for words in ("train optimizer.lr", "generate al", "fork a", "memory q", "checkpoint diff a@", "control pause j"):
    os.environ.update(COMP_WORDS="onstep " + words, COMP_CWORD=str(len(words.split())))
    main([])
sys.exit("torch" in sys.modules)
"""
    environment = {**os.environ, "_ONSTEP_COMPLETE": "complete_bash", "ONSTEP_REGISTRY": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.process
@pytest.mark.usefixtures("runs")
def test_an_interactive_bash_completes_what_is_typed(tmp_path: Path) -> None:
    """Tab is pressed at a terminal: bash splits at `=` itself, and sets the blank after a word, or none."""
    program = tmp_path / "onstep"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m onstep "$@"\n')
    program.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    environment = {**os.environ, "HOME": str(tmp_path), "ONSTEP_REGISTRY": str(tmp_path), "PATH": path, "PS1": "$ "}
    near, far = os.openpty()
    shell = subprocess.Popen(
        ["bash", "--norc", "--noprofile", "-i"], env=environment, stdin=far, stdout=far, stderr=far, process_group=0
    )
    os.close(far)
    try:
        for typed, completed in (
            ('eval "$(onstep --show-completion bash)"; echo rea""dy\r', "ready"),
            ("echo onstep; onstep control ev\t", "evaluate "),
            ("\x15onstep train optimizer.weight_d\t.", "train optimizer.weight_decay=."),
            ("\x15onstep train optimizer.optimizer=mu\t.", "train optimizer.optimizer=muon ."),
            ("\x15onstep why bet\t.", "why beta ."),
        ):
            os.write(near, typed.encode())
            assert completed in read_terminal(near, completed)
    finally:
        shell.kill()
        shell.wait()
        os.close(near)
