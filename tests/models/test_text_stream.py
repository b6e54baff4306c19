"""Text appears token by token, and together it is the text of all tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from onstep.data import ByteTokenizer
from onstep.models.generation.text_stream import text_pieces

TEXT = "for é in ‘日本語’:\n    print(é) \U0001f600!"


def words(ids: Sequence[int]) -> str:
    """Like a decoder of SentencePiece: the space before the first word is dropped."""
    return "".join(f" w{one}" for one in ids).removeprefix(" ")


def test_characters_of_several_bytes_appear_when_they_are_complete() -> None:
    pieces = list(text_pieces(TEXT.encode(), ByteTokenizer().decode))
    assert "".join(pieces) == TEXT
    assert "日" in pieces
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_text_appears_as_soon_as_its_tokens_come() -> None:
    came: list[int] = []

    def tokens() -> object:
        for token in (1, 2, 3):
            came.append(token)
            yield token

    seen = [(piece, len(came)) for piece in text_pieces(tokens(), words)]  # type: ignore[arg-type]
    assert seen == [("w1", 1), (" w2", 2), (" w3", 3)]


def test_the_space_between_the_text_before_and_the_first_token_is_kept() -> None:
    assert "".join(text_pieces([3, 4], words, after=[1, 2])) == " w3 w4"
    assert "".join(text_pieces([3, 4], words, after=range(100))) == " w3 w4"


@pytest.mark.parametrize("data", [b"\xff\xfe", "é".encode()[:1], b"ab\xe6\x97"])
def test_bytes_that_never_become_a_character_are_shown_at_the_end(data: bytes) -> None:
    assert "".join(text_pieces(data, ByteTokenizer().decode)) == data.decode("utf-8", "replace")


def test_no_tokens_are_no_text() -> None:
    assert list(text_pieces([], words, after=[1])) == []
