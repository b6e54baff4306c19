"""What run.json records of the process: machine, versions and code; never at the cost of the run."""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from onstep import pretrain
from onstep.config import ConfigContainer
from onstep.training.runs.provenance import code_revision, provenance


def git(directory: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(directory), *who, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    there = tmp_path / "project"
    (there / "scripts").mkdir(parents=True)
    (there / "train.py").write_text("print(1)\n")
    git(there, "init", "-q", "-b", "trunk")
    git(there, "add", "train.py")
    git(there, "commit", "-q", "-m", "First")
    return there


def recorded(config: ConfigContainer) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((Path(config.run.output_dir) / "mine" / "run.json").read_text())
    return content


@pytest.fixture
def config(tiny_config: ConfigContainer, tmp_path: Path) -> ConfigContainer:
    tiny_config.run.name, tiny_config.run.output_dir = "mine", str(tmp_path / "runs")
    tiny_config.train.train_iters, tiny_config.scheduler.lr_warmup_iters = 2, 0
    tiny_config.validation.eval_iters = 0
    return tiny_config


def test_a_run_records_its_machine_versions_and_code(
    config: ConfigContainer, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repository)
    pretrain(config)
    left = recorded(config)
    assert left["versions"]["torch"] == torch.__version__
    assert left["versions"]["python"] == platform.python_version()
    assert left["versions"]["onstep"]
    assert left["machine"]["host"] == socket.gethostname()
    assert left["machine"]["cpus"] >= 1
    assert left["machine"]["processor"]
    assert left["code"] == {"revision": git(repository, "rev-parse", "HEAD"), "branch": "trunk", "dirty": False}
    assert "continued_with" not in left


def test_a_run_that_continues_elsewhere_records_both(
    config: ConfigContainer, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repository)
    config.train.exit_interval = 1
    pretrain(config)
    first = recorded(config)["code"]
    (repository / "train.py").write_text("print(2)\n")
    config.train.exit_interval = None
    pretrain(config)
    left = recorded(config)
    assert left["code"] == first
    assert left["continued_with"]["code"] == {**first, "dirty": True}


def test_new_files_do_not_make_the_code_dirty_and_changed_ones_do(repository: Path) -> None:
    (repository / "notes.txt").write_text("new")
    assert code_revision(repository / "scripts") == {**code_revision(repository), "dirty": False}
    (repository / "train.py").unlink()
    assert code_revision(repository / "scripts")["dirty"] is True


def test_a_checkout_of_a_commit_has_no_branch(repository: Path) -> None:
    git(repository, "checkout", "-q", "--detach")
    assert "branch" not in code_revision(repository)


def test_code_without_a_repository_or_a_commit_has_no_revision(tmp_path: Path) -> None:
    assert code_revision(tmp_path) == {}
    git(tmp_path, "init", "-q")
    assert "revision" not in code_revision(tmp_path)


HOSTILE = {
    "monitor": "git config core.fsmonitor PROGRAM",
    "filter": "git config filter.any.clean PROGRAM; git config filter.any.smudge PROGRAM",
    "required filter": "git config filter.any.clean PROGRAM; git config filter.any.required true",
    "filter process": "git config filter.any.process PROGRAM; git config filter.any.required true",
    "filter of an included file": "git config -f .git/more filter.any.clean PROGRAM; git config include.path more",
    "filter of the worktree": "git config extensions.worktreeConfig true; "
    "git config --worktree filter.any.clean PROGRAM",
    "difference": "git config diff.external PROGRAM; git config diff.any.command PROGRAM; "
    "git config diff.any.textconv PROGRAM",
    "pager, editor, signature": "git config core.pager PROGRAM; git config pager.status PROGRAM; "
    "git config core.editor PROGRAM; git config gpg.program PROGRAM; git config log.showSignature true",
    "alias": "git config alias.status '!PROGRAM'; git config alias.config '!PROGRAM'",
    "hooks": "git config core.hooksPath hooks; mkdir hooks; cp PROGRAM hooks/post-index-change; "
    "cp PROGRAM hooks/reference-transaction; cp PROGRAM hooks/post-checkout",
    "object fetched over ssh": "git config core.repositoryformatversion 1; git config extensions.partialClone far; "
    "git config remote.far.promisor true; git config remote.far.url ssh://far/x; git config core.sshCommand PROGRAM; "
    "rm -r .git/objects/??",
    "object fetched by a program": "git config core.repositoryformatversion 1; git config extensions.partialClone far; "
    "git config remote.far.promisor true; git config remote.far.url 'ext::PROGRAM'; "
    "git config protocol.ext.allow always; rm -r .git/objects/??",
    "object fetched from a directory": "git config core.repositoryformatversion 1; "
    "git config extensions.partialClone far; git config remote.far.promisor true; git config remote.far.url .; "
    "git config remote.far.uploadpack PROGRAM; rm -r .git/objects/??",
}
"""What a repository can configure to be run, by name: a shell script in which PROGRAM leaves a proof."""


@pytest.mark.parametrize("way", HOSTILE)
def test_nothing_of_a_repository_is_executed(way: str, repository: Path, tmp_path: Path) -> None:
    proof = tmp_path / "executed"
    program = tmp_path / "program.sh"
    program.write_text(f"#!/bin/sh\ntouch {proof}\ncat\n")
    program.chmod(0o755)
    (repository / ".gitattributes").write_text("* filter=any diff=any\n")
    git(repository, "add", ".gitattributes")
    git(repository, "commit", "-q", "-m", "Second")
    revision = git(repository, "rev-parse", "HEAD")
    subprocess.run(["sh", "-e", "-c", HOSTILE[way].replace("PROGRAM", str(program))], cwd=repository, check=True)
    os.utime(repository / "train.py", (1, 1))  # its content has to be compared
    found = code_revision(repository)
    assert not proof.exists()
    assert found == {} if "object" in way else found == {"revision": revision, "branch": "trunk", "dirty": False}


@pytest.mark.parametrize("name", ["a=b", "a.clean=x", "Mixed Case.\N{SNOWMAN}"])
def test_a_filter_of_any_name_is_not_executed(name: str, repository: Path, tmp_path: Path) -> None:
    proof = tmp_path / "executed"
    (repository / ".gitattributes").write_text("* filter\n* filter=any\n")
    with (repository / ".git" / "config").open("a", encoding="utf-8") as file:
        file.write(f'[filter "{name}"]\nclean = touch {proof}\n[filter "any"]\nclean = touch {proof}\n')
    os.utime(repository / "train.py", (1, 1))
    assert ("revision" in code_revision(repository)) is ("=" not in name)
    assert not proof.exists()


def test_a_changed_file_is_seen_although_a_filter_would_hide_the_change(repository: Path) -> None:
    (repository / ".gitattributes").write_text("train.py filter=any\n")
    git(repository, "config", "filter.any.clean", "echo 'print(1)'")
    (repository / "train.py").write_text("print(2)\n")
    assert code_revision(repository)["dirty"] is True


@pytest.mark.parametrize("script", ["exit 3", "echo '# branch.oid '", "head -c 100000 /dev/urandom", "exec sleep 60"])
def test_a_git_that_fails_costs_no_run(
    script: str, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "git").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "bin" / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    started = time.monotonic()
    assert code_revision(repository, timeout_seconds=0.5).get("revision") is None
    assert time.monotonic() - started < 30


def test_a_working_directory_that_is_gone_costs_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert "code" not in provenance()
    assert provenance()["machine"]["host"]


@pytest.mark.parametrize(("kind", "least", "most"), [("bytes", 1.0, 1.0), ("bpe", 1.2, 4.0)])
def test_the_tokenizer_is_recorded_with_the_bytes_of_its_tokens(
    tiny_config: ConfigContainer, tmp_path: Path, kind: str, least: float, most: float
) -> None:
    tiny_config.tokenizer.tokenizer_type, tiny_config.train.train_iters = kind, 1
    tiny_config.tokenizer.vocab_size = 512 if kind == "bpe" else None
    tiny_config.scheduler.lr_warmup_iters, tiny_config.run.name = 0, "mine"
    tiny_config.run.output_dir = str(tmp_path)
    pretrain(tiny_config)
    found = recorded(tiny_config)["tokenizer"]
    assert found["fingerprint"].startswith("bytes-" if kind == "bytes" else "tokenizers ")
    assert least <= found["bytes_per_token"] <= most
