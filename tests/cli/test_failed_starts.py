"""A command whose start fails leaves no directory, on one rank or two, and two ranks print a run once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from onstep.cli.config import configuration
from onstep.cli.main import main
from onstep.cli.train import announce
from tests.support.forked_processes import Processes
from tests.support.shell import Shell


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


def test_an_evaluation_of_tasks_is_one_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["evaluate", "mine", "--tasks", "first"]) == 1
    said = "error: onstep evaluate is one process, but $WORLD_SIZE is 2; start it without torchrun.\n"
    assert capsys.readouterr().err == said


NO_CORPUS = [
    ("paper.pdf", "paper.pdf is not text: it looks like a PDF (byte 0x00 at offset 5); extract its text first"),
    ("emptyd", "the corpus directory 'emptyd' has no text files; name the files or give a glob"),
    ("pdfs", "the corpus directory 'pdfs' has no text files; name the files or give a glob"),
    ("a*.txt", "the corpus glob 'a*.txt' matches no files"),
    ("/dev/null", "the corpus path '/dev/null' is not a regular file"),
    ("mixed", "mixed/paper.txt is not text: it looks like a PDF"),
    ("text.txt,nowhere.jsonl", "the corpus path 'nowhere.jsonl' does not exist"),
]
NO_TEXT = [
    ("t.csv", "t.csv is a table, whose commas and quotes would be learnt as prose"),
    ("empty.txt", "the corpus is empty: no text in empty.txt; give files with text"),
]
NO_START = [
    ("train callbacks=[Nope]", "A callback is named module:Class, got 'Nope'."),
    ("train callbacks=[EMA]", "got 'EMA'; write callbacks=[onstep.callbacks:EMA]."),
    ("train callbacks=nope:Nope", "callbacks=nope:Nope: No module named 'nope'; import a file with --import nope.py"),
    ("train --on-config-change=nope", "checkpoint.on_config_change='nope' must be error | keep | apply"),
    ("train checkpoint.pretrained_checkpoint=nope", "checkpoint.pretrained_checkpoint=nope does not exist, and"),
    (
        "train checkpoint.load=nope",
        "checkpoint.load=nope does not exist, and neither does the run runs/nope; pass a run",
    ),
    ("train checkpoint.load=saved/checkpoint-9", "Did you mean 'checkpoint-8'?"),
    (
        "finetune checkpoint.load=nope",
        "checkpoint.load=nope does not exist, and neither does the run runs/nope; pass a H",
    ),
]
REFUSED = [
    *((f"train dataset.paths=[{paths}]", said) for paths, said in [*NO_CORPUS, *NO_TEXT]),
    *((f"finetune checkpoint.load=saved dataset.paths=[{paths}]", said) for paths, said in NO_CORPUS),
    *NO_START,
]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with what cannot be trained on, and with a checkpoint that cannot be loaded."""
    monkeypatch.chdir(tmp_path)
    for directory in ("emptyd", "pdfs", "mixed", "saved/checkpoint-8"):
        (tmp_path / directory).mkdir(parents=True)
    for name in ("paper.pdf", "pdfs/a.pdf", "mixed/paper.txt"):
        (tmp_path / name).write_bytes(b"%PDF-\0" if name.startswith("mixed") else b"paper\0")
    (tmp_path / "t.csv").write_text("a,b\n1,2\n")
    (tmp_path / "text.txt").write_text("text")
    (tmp_path / "mixed" / "a.txt").write_text("text")
    (tmp_path / "empty.txt").touch()
    return tmp_path


@pytest.mark.parametrize(("words", "said"), REFUSED)
@pytest.mark.usefixtures("place")
def test_data_callbacks_and_weights_are_refused_before_torch_is_loaded(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 1
    shown = capsys.readouterr()
    assert said in shown.err
    assert "loading PyTorch" not in shown.out


@pytest.mark.process
def test_no_refusal_imports_torch(place: Path) -> None:
    code = f"""
import sys
from onstep.cli.main import main
for words in {[words for words, _ in REFUSED]!r}:
    assert main(words.split()) == 1, words
    assert "torch" not in sys.modules, words
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=place, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("place")
def test_a_directory_without_text_files_is_refused_with_what_it_has(caplog: pytest.LogCaptureFixture) -> None:
    assert main(["train", "dataset.paths=[pdfs]"]) == 1
    assert caplog.messages == ["dataset.paths: files in its directories are not read for their suffix: 1 .pdf"]


@pytest.mark.parametrize("kind", ["text", "chat"])
def test_only_the_first_files_of_a_large_directory_are_looked_at(place: Path, kind: str) -> None:
    (place / "large").mkdir()
    for number in range(1500):
        (place / "large" / f"{number:04}.txt").touch()
    names = os.listdir("large")
    (place / "large" / names[-1]).write_text("text")
    config, _ = configuration(["dataset.paths=[large]", f"dataset.kind={kind}"], None)
    announce(config)
    (place / "large" / names[-1]).write_text("")
    if kind == "text":
        assert main(["train", "dataset.paths=[large]"]) == 1


@pytest.mark.skipif(not Path("/proc/version").exists(), reason="requires /proc")
@pytest.mark.usefixtures("place")
def test_a_file_whose_size_is_not_known_is_not_empty() -> None:
    config, _ = configuration(["dataset.paths=[/proc/version]"], None)
    announce(config)


OTHER_WORDS = [
    ("checkpoint.load=nope", "checkpoint.load=nope does not exist"),
    ("checkpoint.pretrained_checkpoint=nope", "checkpoint.pretrained_checkpoint=nope does not exist"),
    ("dataset.paths=[paper.pdf]", "paper.pdf is not text"),
]


@pytest.mark.parametrize(("word", "said"), OTHER_WORDS)
def test_what_another_run_has_is_not_answered_first(
    word: str, said: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record_run(place, {"train": {"global_batch_size": 3}})
    assert main(["train", word]) == 1
    shown = capsys.readouterr()
    assert said in shown.err
    assert "global_batch_size" not in shown.err
    assert "loading PyTorch" not in shown.out


@pytest.mark.parametrize(
    ("word", "record"),
    [
        ("checkpoint.load=gone", {"config": {"checkpoint": {"load": "gone"}}}),
        ("checkpoint.load=gone", {"started_from": "HERE/gone"}),
        ("checkpoint.load=gone checkpoint.ckpt_step=4", {"started_from": "HERE/gone step 4"}),
        ("checkpoint.pretrained_checkpoint=gone", {"config": {"checkpoint": {"pretrained_checkpoint": "gone"}}}),
        ("dataset.paths=[gone.txt]", {"config": {"dataset": {"paths": ["gone.txt"]}}}),
        ("dataset.paths=[gone.txt] checkpoint.on_config_change=keep", {"config": {"dataset": {"paths": ["text.txt"]}}}),
    ],
)
def test_a_run_continues_without_what_it_has_started_from(word: str, record: dict[str, object], place: Path) -> None:
    record_run(place, **json.loads(json.dumps(record).replace("HERE", str(place))))
    config, _ = configuration(word.split(), None)
    announce(config)


@pytest.mark.parametrize("load", ["runs/tiny_gpt", "runs/tiny_gpt/checkpoints", "mine"])
@pytest.mark.usefixtures("place")
def test_a_new_run_may_load_from_where_it_saves(load: str) -> None:
    config, _ = configuration([f"checkpoint.load={load}", *(["checkpoint.save=mine"] if load == "mine" else [])], None)
    announce(config)


@pytest.mark.usefixtures("place")
def test_a_module_that_an_imported_file_may_make_is_not_refused(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text("from onstep.errors import OnstepError\n\nraise OnstepError('imported')")
    assert main(["train", "--import", "mine.py", "callbacks=[mine:Mine]"]) == 1
    assert capsys.readouterr().err == "error: imported\n"


def record_run(place: Path, config: dict[str, object] | None = None, **further: object) -> None:
    """Write the run.json of `runs/tiny_gpt`."""
    (place / "runs" / "tiny_gpt").mkdir(parents=True)
    record = {"format": 1, "status": "completed", "step": 9, "config": config or {}, **further}
    (place / "runs" / "tiny_gpt" / "run.json").write_text(json.dumps(record))


@pytest.mark.distributed
def test_two_ranks_leave_nothing_behind_either(processes: Processes, tmp_path: Path) -> None:
    done = Shell(processes, tmp_path).onstep("train", "dataset.paths=nowhere.txt", ranks=2)
    assert done.returncode == 1
    assert "the corpus path 'nowhere.txt' does not exist" in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"rank-0.out", "rank-1.out"}


@pytest.mark.distributed
def test_two_ranks_print_a_run_once(processes: Processes, tmp_path: Path, corpus: Path, token_cache: Path) -> None:
    words = [
        "train.train_iters=4",
        "model.num_layers=1",
        "model.hidden_size=32",
        "validation.eval_iters=1",
        "dist.device=cpu",
        f"dataset.paths={corpus}",
        f"dataset.cache_dir={token_cache}",
    ]
    done = Shell(processes, tmp_path).onstep("train", *words, ranks=2)
    assert done.returncode == 0, done.stderr
    said = done.stdout + done.stderr
    lines = [line.split(maxsplit=1)[-1] if line[2:3] == ":" else line for line in said.splitlines() if line.strip()]
    assert len(lines) == len(set(lines)), said
    assert len([line for line in lines if "split" in line]) == 1
