"""What is not text, and tables, are not trained on as prose."""

from __future__ import annotations

import gzip
import io
import random
import zipfile
from pathlib import Path

import pytest

from onstep.config import ConfigContainer
from onstep.data import find_files
from onstep.data.corpus.documents import iter_documents
from onstep.errors import DataError
from onstep.training import pretrain

NOISE = random.Random(0).randbytes(30_000)


def zipped() -> bytes:
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w") as archive:
        archive.writestr("a.txt", "text")
    return memory.getvalue()


REFUSED = [
    ("paper.pdf", NOISE, rf"like a PDF \(byte 0x00 at offset {NOISE.index(0)}\); extract its text first"),
    ("paper.txt", b"%PDF-1.4\nwithout compression", r"like a PDF \(byte 0x25 at offset 0\)"),
    ("noise", NOISE[:300].replace(b"\0", b"\1"), "like binary data .* extract the text first"),
    ("a.jsonl", gzip.compress(b"{}"), "like a compressed file .* unpack it"),
    ("a.txt", zipped(), "like an archive"),
    ("a.xlsx", zipped(), "like a spreadsheet .* export it as csv; read a table with dataset.kind=huggingface"),
    ("a.parquet", b"PAR1\x15\x04", "like a table .* dataset.kind=huggingface and dataset.text_key"),
    ("a.md", "text".encode("utf-16"), "like UTF-16 text .* convert it to UTF-8"),
    ("cat.txt", b"\x89PNG\r\n\x1a\n\0\0", "like an image"),
    ("rows.csv", b"a,b\n1,2\n", "rows.csv is a table, .* dataset.kind=huggingface and dataset.text_key"),
    ("notes.ipynb", b'{"cells": []}', "notes.ipynb is a notebook, .* jupyter nbconvert"),
    ("a.txt", rb"{\rtf1\ansi text}", "like a document of an office program"),
    ("figure.eps", b"%!PS-Adobe-3.0 EPSF-3.0", "like PostScript .* extract its text"),
    ("rows.TSV", b"a\tb\n1\t2\n", "rows.TSV is a table"),
    (
        "list.json",
        b' [\n {"text": "a"}]',
        "list.json is JSON with records, .* dataset.kind=huggingface and dataset.text_",
    ),
    ("lines.json", b'{"text": "a"}\r\n{"text": "b"}', "lines.json is JSON with records, .* name it .jsonl"),
]
ACCEPTED = [
    ("a.txt", "grün, weiß und blau\n".encode("latin-1") * 100),
    ("a.txt", "カタカナ".encode("shift-jis") * 100),
    ("a.txt", b"one, two, three\n1, 2, 3\n"),
    ("log.txt", b"\x1b[31mred\x1b[0m\r\n\f"),
    ("a.txt", b"mostly text, and one odd \x01 byte\xff" + b" of many" * 100),
    ("a.txt", b"x" + "ü".encode() * 8000),  # the last byte that is looked at is half a character
    ("a.txt", b"text" * 8000 + b"\0"),
    ("empty.txt", b""),
    ("a.c", b'char *magic = "%PDF-";'),
]


@pytest.mark.parametrize(("name", "content", "message"), REFUSED, ids=[name for name, *_ in REFUSED])
def test_a_file_that_is_not_text_is_refused_by_name(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / "a file of text.txt").write_text("text")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as refusal:
        find_files([tmp_path / "a file of text.txt", tmp_path / name])
    assert str(tmp_path / name) in str(refusal.value)


@pytest.mark.parametrize(("name", "content"), ACCEPTED)
def test_text_of_any_encoding_and_odd_bytes_are_text(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    assert find_files([tmp_path]) == [tmp_path / name]


def test_binary_data_behind_text_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "late.txt").write_bytes(b"good text here. " * 1000 + NOISE)
    (tmp_path / "good.txt").write_text("good text")
    list(iter_documents(find_files([tmp_path]), "text"))
    assert f"late.txt has {NOISE.count(0)} NUL bytes, the first at offset {16_000 + NOISE.index(0)}" in caplog.text
    assert "good.txt" not in caplog.text


def test_a_file_that_was_text_is_looked_at_again_when_it_has_changed(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    assert find_files([tmp_path]) == find_files([tmp_path]) == [tmp_path / "a.txt"]
    (tmp_path / "a.txt").write_bytes(b"%PDF-1.4")
    with pytest.raises(DataError, match="like a PDF"):
        find_files([tmp_path])


def test_a_file_is_read_once_to_see_that_it_is_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("text")
    found = find_files([tmp_path])
    monkeypatch.delattr(Path, "open")
    assert find_files([tmp_path]) == found


def test_tables_in_a_directory_are_left_out(tmp_path: Path) -> None:
    for name in ("a.txt", "b.csv", "c.tsv"):
        (tmp_path / name).write_text("x")
    assert find_files([tmp_path]) == [tmp_path / "a.txt"]


@pytest.mark.parametrize("kind", ["text", "chat"])
def test_a_run_on_a_file_that_is_not_text_does_not_start(
    tiny_config: ConfigContainer, tmp_path: Path, kind: str
) -> None:
    tiny_config.dataset.kind = kind
    tiny_config.dataset.paths = [str(tmp_path / "paper.pdf")]
    (tmp_path / "paper.pdf").write_bytes(NOISE)
    with pytest.raises(DataError, match="is not text: it looks like a PDF"):
        pretrain(tiny_config)
