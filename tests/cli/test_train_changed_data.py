"""A run whose data has changed since it was started: the files are named, and it continues only if asked to."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onstep.data import write_indexed_dataset
from tests.support.forked_processes import Processes, output_of
from tests.support.shell import Done, Shell

SMALL = (
    "dataset.seq_length=32",
    "model.seq_length=32",
    "model.num_layers=1",
    "model.hidden_size=16",
    "model.num_attention_heads=2",
    "train.global_batch_size=4",
    "train.train_iters=4",
    "scheduler.lr_warmup_iters=2",
    "validation.eval_on_start=false",
    "validation.eval_iters=1",
    "dataset.num_workers=0",
    "dataset.cache_dir=cache",
    "dist.device=cpu",
    "run.name=run",
)
TEXT = "dataset.paths=[corpus]"
PAUSES = "train.exit_interval=2"


def with_corpus(processes: Processes, directory: Path) -> Shell:
    for name in ("a.txt", "b.txt", "c.txt"):
        write(directory / "corpus" / name, f"{name}: " + "some text of the corpus. " * 200)
    return Shell(processes, directory)


@pytest.fixture
def shell(processes: Processes, tmp_path: Path) -> Shell:
    """A directory with a corpus of three files."""
    return with_corpus(processes, tmp_path)


@pytest.fixture(scope="module")
def stopped(processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the corpus and a run on it that is paused, to be copied."""
    shell = with_corpus(processes, tmp_path_factory.mktemp("stopped"))
    pause(shell, TEXT)
    return shell.directory


@pytest.fixture
def paused(stopped: Path, processes: Processes, tmp_path: Path) -> Shell:
    """A directory of its own with the corpus and a run on it that is paused."""
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    return Shell(processes, tmp_path)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)


def train(shell: Shell, *words: str) -> Done:
    return shell.onstep("train", *SMALL, *words)


def pause(shell: Shell, *words: str) -> None:
    done = train(shell, PAUSES, *words)
    assert done.returncode == 0, done.stderr
    assert record(shell)["status"] == "paused"


def record(shell: Shell) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((shell.directory / "runs" / "run" / "run.json").read_text())
    return content


def files(shell: Shell) -> dict[str, tuple[bytes, int]]:
    """Every file of the run with its content and its time of change."""
    found = [path for path in (shell.directory / "runs").rglob("*") if path.is_file() and path.name != ".run.lock"]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in found}


def refused(shell: Shell, *words: str) -> str:
    """What a start says that changes nothing and exits with 1."""
    before = files(shell)
    done = train(shell, *words)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert files(shell) == before
    return done.stderr


def test_changed_added_and_removed_files_are_each_named_and_the_run_is_left_alone(paused: Shell) -> None:
    corpus = paused.directory / "corpus"
    write(corpus / "a.txt", "a.txt: " + "some t3xt of the corpus. " * 200)  # as many bytes
    (corpus / "b.txt").rename(corpus / "d.txt")
    said = refused(paused, TEXT)
    assert "corpus/a.txt was changed, corpus/d.txt was added, corpus/b.txt was removed" in said
    assert "c.txt" not in said
    assert "--on-config-change apply" in said
    done = train(paused, TEXT, "--on-config-change", "apply")
    assert done.returncode == 0, done.stderr
    assert "corpus/a.txt was changed" in done.stdout + done.stderr
    assert record(paused)["status"] == "completed"
    assert "nothing left to do" in train(paused, TEXT).stdout, "the run is now one on the changed data"


def test_the_help_says_what_the_switch_does(shell: Shell) -> None:
    said = " ".join(shell.onstep("train", "--help").stdout.split())
    assert "If values or the files of the data changed since the run started: error, keep (stored values) or" in said


def test_keep_cannot_restore_files_and_says_so(paused: Shell) -> None:
    write(paused.directory / "corpus" / "a.txt", "other text " * 300)
    assert "cannot restore files" in refused(paused, TEXT, "--on-config-change", "keep")


def test_a_finished_run_names_the_changed_file(shell: Shell) -> None:
    assert train(shell, TEXT).returncode == 0
    write(shell.directory / "corpus" / "b.txt", "other text " * 300)
    said = refused(shell, TEXT)
    assert "corpus/b.txt was changed" in said
    assert "nothing left to do" not in said
    done = train(shell, TEXT, "--on-config-change=apply")
    assert done.returncode == 0
    assert "nothing left to do" in done.stdout
    assert "corpus/b.txt was changed" in done.stdout
    longer = train(shell, TEXT, "--on-config-change=apply", "train.train_iters=6")
    assert longer.returncode == 0, longer.stderr
    assert record(shell)["step"] == 6


def test_a_finished_run_whose_corpus_is_gone_is_still_finished(shell: Shell) -> None:
    assert train(shell, TEXT).returncode == 0
    shutil.rmtree(shell.directory / "corpus")
    done = train(shell, TEXT)
    assert done.returncode == 0, done.stderr
    assert "nothing left to do" in done.stdout
    assert "could not be compared" in done.stdout
    assert "'corpus' does not exist" in done.stdout


def test_content_counts_and_neither_times_nor_places(paused: Shell, tmp_path: Path) -> None:
    for path in (tmp_path / "corpus").iterdir():
        os.utime(path, (1, 1))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("corpus", "runs"):
        shutil.move(tmp_path / name, elsewhere / name)
    done = train(Shell(paused.processes, elsewhere), TEXT)
    assert done.returncode == 0, done.stderr
    assert record(Shell(paused.processes, elsewhere))["status"] == "completed"


def test_a_directory_that_moved_is_the_same_data_under_another_path(paused: Shell) -> None:
    (paused.directory / "corpus").rename(paused.directory / "moved")
    assert "dataset.paths is ['corpus'] there and ['moved'] here" in refused(paused, "dataset.paths=[moved]")
    done = train(paused, "dataset.paths=[moved]", "--on-config-change=apply")
    assert done.returncode == 0, done.stderr
    assert "has changed:" not in done.stdout + done.stderr


def test_a_run_of_an_earlier_version_continues_with_one_line(paused: Shell) -> None:
    run = paused.directory / "runs" / "run"
    content = record(paused)
    del content["identity"]
    (run / "run.json").write_text(json.dumps(content))
    (run / "identity.json").unlink()
    done = train(paused, TEXT, PAUSES)
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count("could not be compared") == 1
    write(paused.directory / "corpus" / "a.txt", "other text " * 300)
    assert "corpus/a.txt was changed" in refused(paused, TEXT), "from then on, its data is recorded"


@pytest.mark.parametrize("damage", ["", "[" * 100_000, '{"data": [1]}'])
def test_without_a_list_of_the_files_a_change_is_still_noticed(paused: Shell, damage: str) -> None:
    listed = paused.directory / "runs" / "run" / "identity.json"
    before = listed.read_text()
    listed.write_text(damage)
    assert train(paused, TEXT, PAUSES).returncode == 0
    assert listed.read_text() == before, "what is known is written again"
    listed.write_text(damage)
    write(paused.directory / "corpus" / "a.txt", "other text " * 300)
    assert "the data has changed (identity.json" in refused(paused, TEXT, "train.train_iters=4")


@pytest.mark.parametrize("identity", [None, 7, ["data"], {"data": 7}])
def test_a_record_of_another_kind_counts_as_none(paused: Shell, identity: Any) -> None:
    (paused.directory / "runs" / "run" / "run.json").write_text(json.dumps({**record(paused), "identity": identity}))
    done = train(paused, TEXT)
    assert done.returncode == 0, done.stderr
    assert "could not be compared" in done.stdout + done.stderr


def text_of_json_lines(directory: Path) -> Callable[[int], None]:
    def rows(number: int) -> None:
        texts = [f"record {one} " * 20 for one in range(60)]
        texts[number] = texts[number].upper()
        (directory / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

    return rows


def chats(directory: Path) -> Callable[[int], None]:
    def rows(number: int) -> None:
        answers = [{"prompt": f"Say {one}", "response": f"{one}, said"} for one in range(60)]
        answers[number]["response"] = "no"
        (directory / "chat.jsonl").write_text("".join(json.dumps(answer) + "\n" for answer in answers))

    return rows


def indexed_file(directory: Path) -> Callable[[int], None]:
    def documents(number: int) -> None:
        ids = [list(range(200)) for _ in range(20)]
        ids[number][100] = 7
        write_indexed_dataset(directory / "blended", ids, vocab_size=257, end_id=256)
        write_indexed_dataset(directory / "other", [range(200)] * 20, vocab_size=257, end_id=256)

    return documents


@pytest.mark.parametrize(
    ("make", "words", "changed"),
    [
        (text_of_json_lines, ["dataset.paths=[texts.jsonl]"], "texts.jsonl was changed"),
        (chats, ["dataset.kind=chat", "dataset.paths=[chat.jsonl]"], "chat.jsonl was changed"),
        (
            indexed_file,
            ["dataset.kind=megatron", "dataset.paths=[other,blended]", "dataset.split=80,20"],
            "blended.bin was changed",
        ),
    ],
)
def test_every_kind_of_data_is_compared(
    shell: Shell, make: Callable[[Path], Callable[[int], None]], words: list[str], changed: str
) -> None:
    content = make(shell.directory)
    content(3)
    pause(shell, *words)
    content(4)
    said = refused(shell, *words)
    assert f"the data has changed: {changed}." in said
    content(3)
    assert train(shell, *words).returncode == 0


def test_rows_of_the_datasets_library_are_compared_by_their_files(shell: Shell) -> None:
    pytest.importorskip("datasets")
    words = ["dataset.kind=huggingface", "dataset.paths=[rows]", "dataset.text_key=body"]

    def rows(number: int) -> None:
        texts = [f"the text of row {one} " * 10 for one in range(60)]
        texts[number] = texts[number].upper()
        lines = "".join(json.dumps({"body": text}) + "\n" for text in texts)
        write(shell.directory / "rows" / "train.jsonl", lines)

    home = {"HF_HOME": str(shell.directory / "hf")}
    rows(3)
    assert shell.onstep("train", *SMALL, *words, PAUSES, **home).returncode == 0
    rows(4)
    done = shell.onstep("train", *SMALL, *words, **home)
    assert done.returncode == 1
    assert "the data has changed: rows/train.jsonl was changed" in done.stderr
    rows(3)
    # the library's fingerprint depends on its cache, the content does not; a server that has imported it has another
    shutil.rmtree(shell.directory / "hf", ignore_errors=True)
    assert shell.onstep("train", *SMALL, *words, **home).returncode == 0


def test_a_changed_tokenizer_file_is_named(shell: Shell) -> None:
    pytest.importorskip("tokenizers")
    assert train(shell, TEXT, "tokenizer.tokenizer_type=bpe", "tokenizer.vocab_size=300").returncode == 0
    shutil.copy(shell.directory / "runs" / "run" / "tokenizer.json", shell.directory / "mine.json")
    shutil.rmtree(shell.directory / "runs")
    words = [TEXT, "tokenizer.tokenizer_type=tokenizers", "tokenizer.tokenizer_model=mine.json"]
    pause(shell, *words)
    content = json.loads((shell.directory / "mine.json").read_text())
    content["model"]["merges"] = content["model"]["merges"][:-1]
    (shell.directory / "mine.json").write_text(json.dumps(content))
    assert "the tokenizer has changed: mine.json was changed" in refused(shell, *words)


def test_many_changed_files_are_counted(paused: Shell) -> None:
    for number in range(9):
        write(paused.directory / "corpus" / f"new{number}.txt", "more text")
    assert "corpus/new4.txt was added, and 4 more" in refused(paused, TEXT)


def test_fine_tuning_notices_a_changed_chat_file(shell: Shell) -> None:
    assert train(shell, TEXT, "run.name=base", "checkpoint.save_at_end=true").returncode == 0
    content = chats(shell.directory)
    content(3)
    words = [
        *("finetune", "checkpoint.pretrained_checkpoint=runs/base", "dataset.paths=[chat.jsonl]"),
        *SMALL,
        *("run.name=tuned", "train.num_epochs=null", "scheduler.lr_warmup_fraction=null"),
    ]
    assert shell.onstep(*words, PAUSES).returncode == 0
    content(4)
    done = shell.onstep(*words)
    assert done.returncode == 1
    assert "the data has changed: chat.jsonl was changed" in done.stderr


@pytest.mark.distributed
def test_two_ranks_refuse_changed_data_together(processes: Processes, shell: Shell) -> None:
    def start(*words: str) -> list[int]:
        argv = ["train", *SMALL, TEXT, *words]
        return processes.run("tests.support.jobs.resume_jobs", "cli", shell.directory, {"argv": argv}, ranks=2)

    assert start(PAUSES) == [0, 0], output_of(shell.directory)
    write(shell.directory / "corpus" / "a.txt", "other text " * 300)
    before = files(shell)
    assert start() == [1, 1]
    assert files(shell) == before
    said = (shell.directory / "rank-0.out").read_text()
    assert "corpus/a.txt was changed" in said
    assert start("--on-config-change=apply") == [0, 0]


@pytest.mark.distributed
def test_ranks_that_read_different_files_do_not_train(processes: Processes, shell: Shell) -> None:
    for rank in (0, 1):
        write(shell.directory / f"of-{rank}" / "text.txt", f"text of rank {rank} " * 300)
    settings = {"words": list(SMALL)}
    codes = processes.run("tests.support.jobs.identity_jobs", "own_corpus", shell.directory, settings, ranks=2)
    assert codes == [0, 0], output_of(shell.directory)
    for rank in (0, 1):
        said = json.loads((shell.directory / f"result-{rank}.json").read_text())
        assert "rank 1 does not read what rank 0 reads" in said
    assert not (shell.directory / "runs").exists()


def test_weights_are_not_used_with_a_changed_tokenizer_without_a_warning(shell: Shell) -> None:
    pytest.importorskip("tokenizers")
    assert train(shell, TEXT, "tokenizer.tokenizer_type=bpe", "tokenizer.vocab_size=300").returncode == 0
    file = shell.directory / "mine.json"
    shutil.copy(shell.directory / "runs" / "run" / "tokenizer.json", file)
    shutil.rmtree(shell.directory / "runs")
    assert (
        train(shell, TEXT, "tokenizer.tokenizer_type=tokenizers", "tokenizer.tokenizer_model=mine.json").returncode == 0
    )
    tune = [
        "finetune",
        "checkpoint.pretrained_checkpoint=runs/run",
        *SMALL,
        TEXT,
        "dataset.kind=text",
        "train.num_epochs=null",
    ]
    uses = [
        ("generate", "runs/run", "text", "--max-new-tokens=2"),
        ("checkpoint", "export", "runs/run", "exported", "--force"),
        (*tune, "run.name=tuned", "scheduler.lr_warmup_fraction=null"),
        (*tune, "run.name=tuned-2", "scheduler.lr_warmup_fraction=null"),
    ]

    def said(words: tuple[str, ...]) -> str:
        done = shell.onstep(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    changed = "the tokenizer in mine.json has changed since the weights were trained with it"
    assert not any(changed in said(words) for words in uses[:3])
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(content))
    assert [said(words).count(changed) for words in (*uses[:2], uses[3])] == [1, 1, 1]
