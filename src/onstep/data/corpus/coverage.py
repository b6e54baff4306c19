"""Counts the characters of a corpus that a tokenizer drops, or its unknown tokens."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import numpy.typing as npt

from onstep.data.corpus.tokenizers import ByteTokenizer, Tokenizer
from onstep.errors import DataError

_LOGGER = logging.getLogger(__name__)

_NAMED_FROM = 0.001
"""Share of the characters or tokens from which they are named: normalizers drop a few on purpose."""
_STRANGE = "\U00010380\U00010280"
"""Two letters of dead scripts; a tokenizer that gives both the same ids has no tokens for them."""
_SHOWN = 5


class Coverage:
    """What of the documents a tokenizer has no tokens for.

    A tokenizer with an unknown token is judged by how often it occurs; of one that drops characters, each character is
    encoded once.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._unknown_id, self._drops = _behaviour(tokenizer)
        self._known: set[str] = set()
        self._lost: set[str] = set()
        self._number = self._num_lost = 0

    def add(self, text: bytes, ids: npt.NDArray[Any]) -> None:
        """Count in a document and its ids."""
        if self._unknown_id is not None:
            self._number += ids.size
            self._num_lost += int(np.count_nonzero(ids == self._unknown_id))
        elif self._drops:
            self._add_characters(text.decode("utf-8", errors="ignore"))  # the tokenizer refuses what is not UTF-8

    def warn(self, name: str) -> None:
        """Warn if a noticeable share of the corpus `name` has no tokens of its own."""
        if self._num_lost < max(1, _NAMED_FROM * self._number):
            return
        share = f"{self._num_lost} of {self._number}", f"({100 * self._num_lost / self._number:.2g} %)"
        if self._unknown_id is not None:
            what = f"{share[0]} tokens {share[1]} of {name} are the tokenizer's unknown token"
        else:
            shown = ", ".join(map(repr, sorted(self._lost)[:_SHOWN])) + (", ..." if len(self._lost) > _SHOWN else "")
            share_of = f"{share[0]} characters {share[1]} of {name}"
            what = f"the tokenizer has no tokens for {share_of}, which are dropped: {shown}"
        _LOGGER.warning("%s; use a tokenizer that was trained on such text", what)

    def _add_characters(self, characters: str) -> None:
        distinct = set(characters)
        for character in distinct - self._known:
            is_shown = character.isprintable() and not character.isspace()
            if is_shown and not len(self._tokenizer.encode(character.encode())):
                self._lost.add(character)
        self._known |= distinct
        self._number += len(characters)
        self._num_lost += sum(characters.count(character) for character in distinct & self._lost)


def _behaviour(tokenizer: Tokenizer) -> tuple[int | None, bool]:
    """The id of the unknown token, if any, and whether characters without tokens are dropped."""
    if isinstance(tokenizer, ByteTokenizer):
        return None, False
    try:
        one, other = (list(tokenizer.encode(strange.encode())) for strange in _STRANGE)
        around = {*tokenizer.encode(b""), *tokenizer.encode(b" ")}  # such as the mark of the start of a word
    except DataError:  # the tokenizer refuses what it has no tokens for
        return None, False
    unknown = [number for number in one if number not in around]
    return (unknown[0] if one == other and unknown else None), not unknown
