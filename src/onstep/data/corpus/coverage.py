"""Counts the characters of a corpus that a tokenizer drops or replaces by its unknown token."""

from __future__ import annotations

import logging

from onstep.data.corpus.tokenizers import ByteTokenizer, Tokenizer

_LOGGER = logging.getLogger(__name__)

_NAMED_FROM = 0.001
"""Share of the characters from which they are named: normalizers drop a few on purpose."""
_STRANGE = "\U00010380\U00010280"
"""Two letters of dead scripts; a tokenizer that gives both the same ids has an unknown token."""
_SHOWN = 5


class Coverage:
    """The characters of documents for which a tokenizer has no token of their own; each is encoded once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = None if isinstance(tokenizer, ByteTokenizer) else tokenizer
        self._known: set[str] = set()
        self._lost: set[str] = set()
        self._unknown_ids: list[int] | None = None
        self._num_characters = self._num_lost = 0

    def add(self, text: bytes) -> None:
        """Count the characters of a document."""
        if self._tokenizer is None:
            return
        characters = text.decode("utf-8", errors="ignore")  # the tokenizer refuses what is not UTF-8
        distinct = set(characters)
        for character in distinct - self._known:
            if self._is_lost(self._tokenizer, character):
                self._lost.add(character)
        self._known |= distinct
        self._num_characters += len(characters)
        self._num_lost += sum(characters.count(character) for character in distinct & self._lost)

    def warn(self, name: str) -> None:
        """Warn if a noticeable share of the corpus `name` has no tokens of its own."""
        if self._num_lost < max(1, _NAMED_FROM * self._num_characters):
            return
        shown = ", ".join(map(repr, sorted(self._lost)[:_SHOWN])) + (", ..." if len(self._lost) > _SHOWN else "")
        share = 100 * self._num_lost / self._num_characters
        become = "become its unknown token" if self._unknown_ids else "are dropped"
        _LOGGER.warning(
            "the tokenizer has no tokens for %d of %d characters (%.2g %%) of %s, which %s: %s; use a tokenizer that "
            "was trained on such text",
            self._num_lost,
            self._num_characters,
            share,
            name,
            become,
            shown,
        )

    def _is_lost(self, tokenizer: Tokenizer, character: str) -> bool:
        if self._unknown_ids is None:
            one, other = (list(tokenizer.encode(strange.encode())) for strange in _STRANGE)
            self._unknown_ids = one if one == other else []
        if character.isspace() or not character.isprintable():
            return False
        ids = list(tokenizer.encode(character.encode()))
        return not ids or ids == self._unknown_ids
