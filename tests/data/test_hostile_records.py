"""A line of JSONL that nobody meant as a record ends with an error that names it, in bounded memory."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onstep.data import ChatFiles, ChatKeys
from onstep.data.corpus.documents import MAX_RECORD_BYTES, iter_documents
from onstep.errors import DataError

GOOD = b'{"prompt": "a", "response": "b", "text": "c"}\n'


def read_chats(path: Path) -> list[Any]:
    return list(ChatFiles([path], ChatKeys()).conversations(None))


def read_texts(path: Path) -> list[Any]:
    return list(iter_documents([path], "text"))


@pytest.mark.parametrize("read", [read_chats, read_texts])
@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "more than 100 levels deep"),
        (b'{"a": ' * 100_000 + b"1" + b"}" * 100_000, "more than 100 levels deep"),
        (b'{"text": ' + b"9" * 100_000 + b"}", "an integer of 100000 digits; at most 300"),
        (b'{"text": 1, "text": 2}', "a name occurs twice"),
        (b"\xff\xfe{\0}\0", "'utf-8' codec can't decode"),
        (b"{" + b",".join(b'"%d": 0' % n for n in range(100_000)) + b"}", r"its keys: '0', '1', .*, \.\.\.\)"),
        (b"[" * 100_000, "more than 100 levels deep"),
    ],
    ids=["lists", "objects", "digits", "names", "utf-16", "keys", "cut"],
)
def test_a_hostile_line_is_named(tmp_path: Path, read: Callable[[Path], list[Any]], line: bytes, words: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD + line)
    with pytest.raises(DataError, match=words) as caught:
        read(path)
    assert f"{path}:2" in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("read", [read_chats, read_texts])
def test_no_more_of_an_endless_line_is_read_than_the_limit(tmp_path: Path, read: Callable[[Path], list[Any]]) -> None:
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        file.write(GOOD + b'{"text": "')
        file.truncate(4 << 30)  # a hole takes no room on the disk
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match=rf"a\.jsonl:2 is a line of more than {MAX_RECORD_BYTES:,} bytes, the limit"):
        read(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10  # KiB


@pytest.mark.parametrize("read", [read_chats, read_texts])
def test_a_byte_order_mark_is_skipped(tmp_path: Path, read: Callable[[Path], list[Any]]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD)
    assert len(read(path)) == 1
