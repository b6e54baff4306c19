"""Which files are a corpus, and what its documents are."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from onstep.config import ConfigContainer, DatasetConfig, TokenizerConfig
from onstep.data import default_corpus_files, find_files, iter_documents
from onstep.data.corpus.input_files import dataset_files, tokenizer_files
from onstep.data.corpus.text_files import unread_notes
from onstep.data.corpus.tokenizers import TokenizersTokenizer
from onstep.errors import DataError
from onstep.training import pretrain


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("b.txt", "a.md", "deep/er/c.py", "image.png", ".git/config.txt", "odd.dat"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path


def test_a_directory_is_searched_for_text_and_hidden_directories_are_left_out(tree: Path) -> None:
    assert find_files([tree]) == [tree / "a.md", tree / "b.txt", tree / "deep/er/c.py"]


def test_named_and_matched_files_are_taken_whatever_their_suffix_and_each_once(tree: Path) -> None:
    assert find_files([tree / "odd.dat"]) == [tree / "odd.dat"]
    found = find_files([str(tree / "**/*.py"), tree / "b.txt", str(tree / "[bo]*")])
    assert found == [tree / "b.txt", tree / "deep/er/c.py", tree / "odd.dat"]
    assert find_files([str(tree / "de*")]) == [tree / "deep/er/c.py"]


def run_on(config: ConfigContainer, *paths: Path) -> None:
    config.dataset.paths, config.dataset.split, config.train.train_iters = [str(path) for path in paths], "100", 1
    config.scheduler.lr_warmup_iters, config.validation.eval_interval = 0, None
    pretrain(config)


@pytest.mark.parametrize("pattern", ["", "*.txt"])
def test_so_many_files_of_each_path_are_found_as_are_asked_for(tmp_path: Path, pattern: str) -> None:
    for name in ("a/1.txt", "a/2.txt", "b/1.txt", "b/2.txt", "b/3.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    found = find_files([tmp_path / "a" / pattern, tmp_path / "b" / pattern], at_most=2)
    assert sorted(file.parent.name for file in found) == ["a", "a", "b", "b"]


def test_a_file_that_is_named_twice_is_read_once_and_named(
    tiny_config: ConfigContainer, corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_on(tiny_config, corpus / "heapq.py", corpus / "heapq.py")
    assert f"dataset.paths: {corpus / 'heapq.py'} is named 2 times and read once" in caplog.text


def test_files_with_text_that_a_directory_leaves_out_are_counted(
    tiny_config: ConfigContainer, tree: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tree / "b.txt").write_text("some text " * 100)
    run_on(tiny_config, tree)
    assert "dataset.paths" not in caplog.text
    for name in ("c.txt.gz", "d.gz", "e.parquet", ".hidden.gz"):
        (tree / name).write_text("x")
    run_on(tiny_config, tree)
    assert "dataset.paths: files in its directories are not read for their suffix: 2 .gz, 1 .parquet" in caplog.text


def test_other_files_in_a_directory_of_conversations_are_counted(tree: Path) -> None:
    (tree / "chat.jsonl").write_text("{}")
    assert unread_notes([tree]) == []
    [note] = unread_notes([tree], only_records=True)
    assert note == "files in its directories are not read for their suffix: 1 .md, 1 .py, 1 .txt"


def test_a_file_whose_name_looks_like_a_glob_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "notes[1].txt"
    path.write_text("x")
    assert find_files([path]) == [path]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("nowhere.txt", "the corpus path '.*nowhere.txt' does not exist"),
        ("*.none", "corpus glob '.*none' matches no files"),
        ("empty", "corpus directory '.*empty' has no text files"),
    ],
)
def test_a_path_that_stands_for_nothing_is_named(tree: Path, given: str, message: str) -> None:
    (tree / "empty").mkdir()
    with pytest.raises(DataError, match=message):
        find_files([tree / "b.txt", str(tree / given)])


def test_what_is_not_a_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(DataError, match="is not a regular file"):
            find_files([path])


def test_no_paths_and_a_bare_string_are_refused() -> None:
    with pytest.raises(DataError, match="corpus is empty"):
        find_files([])
    with pytest.raises(DataError, match="put it in a list"):
        find_files("corpus.txt")


def test_the_default_corpus_is_the_standard_library() -> None:
    files = default_corpus_files()
    assert files == default_corpus_files()
    assert 6e6 < sum(path.stat().st_size for path in files) < 2e7
    names = {path.name for path in files}
    assert {"textwrap.py", "argparse.py"} <= names
    assert all({"site-packages", "test", "tests", "idle_test"}.isdisjoint(path.parts[-4:-1]) for path in files)
    assert all(path.suffix == ".py" for path in files)


def test_a_text_file_is_one_document_and_a_jsonl_record_is_one(tmp_path: Path) -> None:
    text, records = tmp_path / "a.txt", tmp_path / "b.jsonl"
    text.write_bytes(b"one\ntwo\n\xff")
    records.write_text('{"body": "gr\\u00fcn"}\n\n   \n{"n": 1, "body": ""}\n{"body": "z"}', encoding="utf-8")
    assert list(iter_documents([text, records], "body")) == [b"one\ntwo\n\xff", "grün".encode(), b"", b"z"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "x"', r"bad.jsonl:3 is not valid JSON: .*\. Each line must contain an object with 'text'"),
        (b'{"text": "\xff"}', r"bad.jsonl:3 is not valid JSON: .*0xff"),
        (b'["x"]', r"bad.jsonl:3 contains a JSON list"),
        (b'{"txt": "x", "id": 4}', r"bad.jsonl:3 has no key 'text' \(its keys: 'txt', 'id'\); set dataset.text_key"),
        (b'{"text": null}', r"bad.jsonl:3: 'text' must be a string, got NoneType"),
    ],
)
def test_a_bad_record_is_named_by_file_and_line(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(json.dumps({"text": "fine"}).encode() + b"\n\n" + line + b"\n")
    documents = iter_documents([path], "text")
    assert next(documents) == b"fine"
    with pytest.raises(DataError, match=message):
        next(documents)


def test_an_endless_line_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "endless.jsonl"
    path.write_text('{"text": "fine"}\n')
    os.truncate(path, 8 << 30)
    documents = iter_documents([path], "text")
    assert next(documents) == b"fine"
    with pytest.raises(DataError, match=r"endless.jsonl:2 is a line of more than 67,108,864 bytes, the limit"):
        next(documents)


@pytest.mark.parametrize(
    "line", [b'{"text": "x", "more": ' + b"[" * depth + b"]" * depth + b"}" for depth in (101, 10**5)]
)
def test_deep_json_is_refused(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "deep.jsonl").write_bytes(line)
    with pytest.raises(DataError, match=r"deep.jsonl:1 is not valid JSON: it is nested more than 100 levels deep"):
        list(iter_documents([tmp_path / "deep.jsonl"], "text"))


def test_a_byte_order_mark_is_accepted_and_a_repeated_name_is_not(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "one"}\n{"text": "x", "text": "two"}\n')
    documents = iter_documents([path], "text")
    assert next(documents) == b"one"
    with pytest.raises(DataError, match=r"a\.jsonl:2 is not valid JSON: a name occurs twice"):
        next(documents)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read corpus file .*gone.txt: No such file"):
        list(iter_documents([tmp_path / "gone.txt"], "text"))


def test_the_home_of_an_unknown_user_does_not_exist() -> None:
    with pytest.raises(DataError, match=r"the corpus path '~nobody-such/x' does not exist"):
        find_files(["~nobody-such/x"])
    assert tokenizer_files(TokenizerConfig("tokenizers", tokenizer_model="~nobody-such/x")) is None


def test_a_pipe_in_place_of_a_tokenizer_or_an_indexed_file_is_refused_at_once(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "a.idx", "a.bin"):
        os.mkfifo(tmp_path / name)
    pipe = str(tmp_path / "tokenizer.json")
    with pytest.raises(DataError, match=r"cannot read tokenizer file .*: it is a pipe instead of a file"):
        TokenizersTokenizer(Path(pipe))
    for path in ("a", "a.bin"):
        with pytest.raises(DataError, match=r"cannot read .*a\.idx: it is a pipe instead of a file"):
            dataset_files(DatasetConfig(kind="megatron", paths=[str(tmp_path / path)]))


def test_runs_in_a_directory_of_text_are_left_out_and_named(tree: Path) -> None:
    before = find_files([tree])
    run = tree / "runs" / "one"
    (run / "deeper").mkdir(parents=True)
    for name in (".run.lock", "run.json", "deeper/state.json"):
        (run / name).write_text("{}")
    assert find_files([tree]) == before
    assert find_files([run]) == [run / "deeper/state.json", run / "run.json"], "it can be named"
    assert unread_notes([tree]) == [f"directories of runs are not read: 1, such as {run}"]


def test_a_directory_that_cannot_be_listed_is_not_left_out(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    list_directory = os.scandir

    def scandir(path: str) -> Any:
        if str(path).endswith("er"):
            raise PermissionError(13, "Permission denied", str(path))
        return list_directory(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(DataError, match=r"cannot read .*deep/er in the corpus directory .*: Permission denied"):
        find_files([tree])
