"""A corpus becomes tokens once, whoever asks for them and how often."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onstep.data import ByteTokenizer, TokenFile, build_token_file, default_cache_dir
from onstep.errors import DataError
from tests.support.waiting import PATIENCE


class Letters:
    """A tokenizer that needs UTF-8: a letter is its code point."""

    fingerprint = "letters"

    def __init__(self, vocab_size: int = 70_000, eos_id: int | None = None) -> None:
        self.vocab_size = vocab_size
        self.eos_id = eos_id

    def encode(self, document: bytes) -> list[int]:
        return self.encode_text(document.decode())

    def encode_text(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


class Counting(ByteTokenizer):
    """Leaves a file for each document that it encodes, in whichever process."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def encode(self, document: bytes) -> Any:
        (self._directory / f"encoded-{os.getpid()}-{len(list(self._directory.glob('encoded*')))}").touch()
        return super().encode(document)

    def num_encoded(self) -> int:
        return len(list(self._directory.glob("encoded*")))


def corpus_of(directory: Path, *texts: bytes) -> list[Path]:
    directory.mkdir(exist_ok=True)
    files = [directory / f"{number}.txt" for number in range(len(texts))]
    for file, text in zip(files, texts, strict=True):
        file.write_bytes(text)
    return files


def build(files: list[Path], cache: Path, tokenizer: Any = None, **options: Any) -> TokenFile:
    settings: dict[str, Any] = {"text_key": "text", "show_progress": False} | options
    return build_token_file(files, tokenizer or ByteTokenizer(), cache, **settings)


def test_documents_follow_each_other_each_with_its_end(tmp_path: Path) -> None:
    token_file = build(corpus_of(tmp_path / "in", b"ab", b"", b"\xff"), tmp_path)
    assert token_file.tokens.tolist() == [97, 98, 256, 255, 256]
    assert token_file.tokens.dtype == np.dtype("<u2")
    assert (len(token_file), token_file.num_documents) == (5, 2)


def test_the_smallest_type_that_holds_the_vocabulary_is_used(tmp_path: Path) -> None:
    files = corpus_of(tmp_path / "in", "a\U0001f600".encode())
    token_file = build(files, tmp_path, Letters(vocab_size=2**17, eos_id=2**17 - 1))
    assert token_file.tokens.tolist() == [97, 0x1F600, 2**17 - 1]
    assert token_file.tokens.dtype == np.dtype("<u4")


def test_tokens_cannot_be_written_to(tmp_path: Path) -> None:
    token_file = build(corpus_of(tmp_path / "in", b"ab"), tmp_path)
    with pytest.raises(ValueError, match="read-only"):
        token_file.tokens[0] = 1


def test_the_same_content_is_tokenized_once_whatever_its_name(tmp_path: Path) -> None:
    tokenizer = Counting(tmp_path)
    first = build(corpus_of(tmp_path / "one", b"ab", b"c"), tmp_path / "cache", tokenizer)
    again = build(corpus_of(tmp_path / "two", b"ab", b"c"), tmp_path / "cache", tokenizer, wait_for_other=True)
    assert again == first
    assert tokenizer.num_encoded() == 2


def test_other_content_order_tokenizer_or_key_is_another_file(tmp_path: Path) -> None:
    files = corpus_of(tmp_path / "in", b"ab", b"c")
    records = tmp_path / "in" / "r.jsonl"
    records.write_text('{"text": "x", "body": "y"}')
    built = [
        build(files, tmp_path),
        build(files[::-1], tmp_path),
        build(files, tmp_path, Letters()),
        build(files, tmp_path, Letters(eos_id=3)),
        build(files, tmp_path, Letters(eos_id=256)),
        build([records], tmp_path),
        build([records], tmp_path, text_key="body"),
    ]
    files[0].write_bytes(b"aB")
    built.append(build(files, tmp_path))
    assert len({token_file.path for token_file in built}) == len(built)
    assert [t.tokens.tolist() for t in built[5:]] == [[120, 256], [121, 256], [97, 66, 256, 99, 256]]
    # Where one file ends matters, too.
    assert build(corpus_of(tmp_path / "in", b"a", b"bc"), tmp_path).path != built[0].path


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def break_manifest(path: Path) -> None:
    path.with_suffix(".json").write_text("[1, 2")


def empty_manifest(path: Path) -> None:
    path.with_suffix(".json").write_text("{}")


def deep_manifest(path: Path) -> None:
    path.with_suffix(".json").write_text("[" * 100_000)


def huge_manifest(path: Path) -> None:
    os.truncate(path.with_suffix(".json"), 8 << 30)


def manifest_with(**changes: object) -> Any:
    def damage(path: Path) -> None:
        manifest = json.loads(path.with_suffix(".json").read_text())
        path.with_suffix(".json").write_text(json.dumps(manifest | changes))

    damage.__name__ = str(changes)
    return damage


HOSTILE = [
    deep_manifest,
    huge_manifest,
    manifest_with(dtype="<f2"),
    manifest_with(dtype=["<u2"]),
    manifest_with(dtype=None),
    manifest_with(num_tokens=-1, num_documents=10**400),
    manifest_with(num_tokens=True),
    manifest_with(num_documents=-3),
    manifest_with(source=[]),
    manifest_with(more=1),
]


@pytest.mark.parametrize("damage", [truncate, flip_a_byte, Path.unlink, break_manifest, empty_manifest, *HOSTILE])
def test_a_broken_file_is_made_again(tmp_path: Path, damage: Any) -> None:
    tokenizer = Counting(tmp_path)
    files = corpus_of(tmp_path / "in", bytes(range(256)) * 40)
    first = build(files, tmp_path / "cache", tokenizer)
    damage(first.path)
    again = build(files, tmp_path / "cache", tokenizer)
    assert tokenizer.num_encoded() == 2
    assert again == first
    assert again.tokens[:-1].tolist() == list(range(256)) * 40


def test_a_build_that_fails_leaves_nothing_that_looks_whole(tmp_path: Path) -> None:
    files = corpus_of(tmp_path / "in", b"ab", b"\xff")
    with pytest.raises(DataError):
        build(files, tmp_path / "cache", Letters())
    assert [p.suffix for p in (tmp_path / "cache").iterdir() if p.suffix != ".lock"] == []
    files[1].write_bytes(b"c")
    assert build(files, tmp_path / "cache", Letters()).tokens.tolist() == [97, 98, 99]


def _build_in_process(directory: Path, barrier: Any, results: Any) -> None:
    files = sorted((directory / "in").iterdir())
    barrier.wait(PATIENCE)
    token_file = build(files, directory / "cache", Counting(directory))
    results.put((int(token_file.tokens.sum()), token_file.content_hash))


def test_processes_that_start_together_tokenize_once(tmp_path: Path) -> None:
    corpus_of(tmp_path / "in", *[bytes([number]) * 50_000 for number in range(20)])
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(3), context.Queue()
    processes = [context.Process(target=_build_in_process, args=(tmp_path, barrier, results)) for _ in range(3)]
    for process in processes:
        process.start()
    answers = {results.get(timeout=PATIENCE) for _ in processes}
    for process in processes:
        process.join(PATIENCE)
        assert process.exitcode == 0
    assert len(answers) == 1
    encoded = [p.name for p in tmp_path.glob("encoded*")]
    assert len(encoded) == 20
    assert len({name.split("-")[1] for name in encoded}) == 1


def test_a_token_file_travels_by_its_path(tmp_path: Path) -> None:
    token_file = build(corpus_of(tmp_path / "in", b"a" * 100_000), tmp_path)
    assert len(token_file.tokens) == 100_001
    travelled = pickle.dumps(token_file)
    assert len(travelled) < 1000
    assert np.array_equal(pickle.loads(travelled).tokens, token_file.tokens)


def test_the_bar_counts_the_bytes_of_the_corpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    files = corpus_of(tmp_path / "in", b"a" * 2000, b"b" * 1000)
    build(files, tmp_path / "quiet")
    assert capsys.readouterr().err == ""
    build(files, tmp_path / "loud", show_progress=True)
    assert "Tokenizing: 100%" in (shown := capsys.readouterr().err)
    assert "3.00k/3.00k" in shown


def test_bytes_that_are_not_utf8_are_named_by_file_and_offset(tmp_path: Path) -> None:
    files = corpus_of(tmp_path / "in", b"fine", b"abc\xe9def")
    with pytest.raises(DataError, match=r"1\.txt is not UTF-8: byte 0xe9 at offset 3 .*tokenizer_type 'bytes'"):
        build(files, tmp_path, Letters())
    assert build(files, tmp_path).tokens.tolist()[8] == 0xE9
    records = tmp_path / "r.jsonl"
    records.write_text('{"text": "fine"}\n{"text": "a\\ud800"}')
    with pytest.raises(DataError, match=r"r.jsonl:2 is not UTF-8: byte 0xed at offset 1"):
        build([records], tmp_path, Letters())


def test_ids_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"0\.txt has token ids from 97 to 122.*vocab_size of 100"):
        build(corpus_of(tmp_path / "in", b"az"), tmp_path, Letters(vocab_size=100))


def test_a_corpus_without_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"corpus is empty: no text in .*0\.txt, .*1\.txt"):
        build(corpus_of(tmp_path / "in", b"", b""), tmp_path)
    with pytest.raises(DataError, match="corpus is empty: no text in no files"):
        build([], tmp_path)
    with pytest.raises(DataError, match=r"cannot read .*gone.txt"):
        build([tmp_path / "gone.txt"], tmp_path)


def test_a_cache_that_cannot_be_written_names_directory_and_remedy(tmp_path: Path) -> None:
    (tmp_path / "occupied").write_text("a file")
    with pytest.raises(DataError, match=r"cannot write token files to .*occupied/cache'.*ONSTEP_CACHE"):
        build(corpus_of(tmp_path / "in", b"ab"), tmp_path / "occupied" / "cache")


def test_the_cache_is_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONSTEP_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / ".cache" / "onstep"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache_dir() == tmp_path / "xdg" / "onstep"
    monkeypatch.setenv("ONSTEP_CACHE", str(tmp_path / "own"))
    assert default_cache_dir() == tmp_path / "own"
    files = corpus_of(tmp_path / "in", b"ab")
    built = build_token_file(files, ByteTokenizer(), None, "text", show_progress=False)
    assert built.path.parent == tmp_path / "own"
