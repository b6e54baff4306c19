"""A command whose start fails leaves no directory, on one rank or two, and two ranks print a run once."""

from __future__ import annotations

from pathlib import Path

import pytest

from onstep.cli.main import main
from tests.support.torchrun import finish


@pytest.mark.parametrize(
    "words",
    [
        ["dataset.paths=nowhere.txt"],
        ["callbacks=nowhere:Nothing"],
        ["--import", "nowhere.py"],
        ["model.num_attention_heads=7"],
        ["train.train_iters=50", "scheduler.lr_warmup_iters=75"],
    ],
)
def test_nothing_is_left_behind(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "-q", *words]) == 1
    assert capsys.readouterr().err.startswith("error: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train dataset.paths=nowhere.txt", "the corpus path 'nowhere.txt' does not exist"),
        ("train model.num_attention_heads=7", "model.hidden_size=128 must be a multiple"),
        ("train model.hidden_size=1000000000000", "GiB of memory"),
        ("train run.recipe=nope", "unknown recipe 'nope'"),
        ("train run.name=a/b", "run.name='a/b' must be the name of a directory"),
        ("train --import nowhere.py", "--import nowhere.py: the file does not exist"),
        ("finetune mine", "no configuration file 'mine' and no run 'runs/mine'"),
        ("finetune checkpoint.pretrained_checkpoint=mine", "neither does the run runs/mine"),
        ("finetune", "requires weights to start from"),
        ("demo dataset.split=0,1", "leaves nothing to train on"),
    ],
)
def test_what_requires_no_torch_is_refused_before_it_is_loaded(
    words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words.split()) == 1
    shown = capsys.readouterr()
    assert said in shown.err
    assert "loading PyTorch" not in shown.out


@pytest.mark.process
def test_two_ranks_leave_nothing_behind_either(tmp_path: Path) -> None:
    code, said = finish(["-m", "onstep", "train", "dataset.paths=nowhere.txt"], tmp_path)
    assert code == 1
    assert "the corpus path 'nowhere.txt' does not exist" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.process
def test_two_ranks_print_a_run_once(tmp_path: Path, corpus: Path, token_cache: Path) -> None:
    words = [
        "train.train_iters=4",
        "model.num_layers=1",
        "model.hidden_size=32",
        "validation.eval_iters=1",
        "dist.device=cpu",
        f"dataset.paths={corpus}",
        f"dataset.cache_dir={token_cache}",
    ]
    code, said = finish(["-m", "onstep", "train", *words], tmp_path)
    assert code == 0, said
    lines = [line.split(maxsplit=1)[-1] if line[2:3] == ":" else line for line in said.splitlines() if line.strip()]
    assert len(lines) == len(set(lines)), said
    assert len([line for line in lines if "split" in line]) == 1
