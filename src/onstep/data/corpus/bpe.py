"""Trains a byte-level BPE tokenizer on the corpus, once for all processes and runs."""

from __future__ import annotations

import codecs
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from onstep.data.corpus.build_cache import build_cached, write_text
from onstep.data.corpus.documents import DocumentSource, no_text, not_utf8
from onstep.data.corpus.tokenizers import TokenizersTokenizer
from onstep.errors import DataError, extra

END_TOKEN = "<|endoftext|>"
DEFAULT_VOCAB_SIZE = 8192
SMALLEST_VOCAB_SIZE = 257
"""All bytes plus the end token."""

_FORMAT = "onstep bpe 1"
_PIECE_LETTERS = 1 << 20
"""Characters of a document that are counted at once; documents are split between lines."""
_PIECE_LIMIT = 2 * _PIECE_LETTERS
"""Characters after which a line is split, too."""
_LONG_RUN = re.compile(r"\S{4096}|\s{4096}")
"""What may be counted as one word is split after 4096 characters: the time for a word grows with its length squared."""


def learn_bpe(
    source: DocumentSource,
    vocab_size: int | None,
    cache_dir: str | Path | None,
    *,
    show_progress: bool,
    wait_for_other: bool = False,
) -> TokenizersTokenizer:
    """A byte-level BPE of `vocab_size` tokens (None: 8192) for `source`, from the cache or trained now.

    Token 0 is `<|endoftext|>`, which ends a document; any text can be encoded. A small corpus may yield fewer tokens.
    The same documents and size give the same tokenizer in any process; see `build_token_file` for how processes share
    the work. The tokenizer's `path` is a `tokenizer.json` in the cache.

    Args:
        cache_dir: the directory of the token cache.
        show_progress: whether a progress bar is shown.
        wait_for_other: whether another process goes first, for some seconds: the one that shows the progress bar.

    Raises:
        DataError: for a corpus that is empty or not UTF-8, or a size below 257 (all bytes and the end token).
        MissingExtraError: if `tokenizers` is not installed.
    """
    size = DEFAULT_VOCAB_SIZE if vocab_size is None else vocab_size
    if size < SMALLEST_VOCAB_SIZE:
        raise DataError(f"tokenizer.vocab_size={size} must be >= {SMALLEST_VOCAB_SIZE}: all bytes and the end token")

    def make(path: Path) -> TokenizersTokenizer:
        write_text(path, _learn(source, size, "Learning BPE" if show_progress else None))
        return TokenizersTokenizer(path)

    described = f"{_FORMAT}\0{size}"
    return build_cached(source, described, ".bpe.json", cache_dir, _find, make, wait_for_other=wait_for_other)


def _find(path: Path) -> TokenizersTokenizer | None:
    """The tokenizer at `path`; None if it is missing or incomplete and has to be trained again."""
    try:
        return TokenizersTokenizer(path) if path.is_file() else None
    except DataError:
        return None


def _learn(source: DocumentSource, size: int, label: str | None) -> str:
    """Train the tokenizer; returns the content of its `tokenizer.json`."""
    with extra("hf", "tokenizer_type 'bpe' requires the library 'tokenizers'"):
        import tokenizers
        from tokenizers import decoders, models, pre_tokenizers, trainers
    tokenizer: Any = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_TOKEN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    num_letters = 0

    def texts() -> Iterator[str]:
        nonlocal num_letters
        for document in source.documents(label):
            try:
                for piece in _pieces(document.data):
                    num_letters += len(piece)
                    yield piece
            except UnicodeDecodeError as error:
                raise not_utf8(document, error) from error

    tokenizer.train_from_iterator(texts(), trainer)
    # A process forked after the library's threads were used, such as a data loader worker, must not use them; unless
    # disabled explicitly, the library warns in each such process.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not num_letters:
        raise DataError(no_text(source.name))
    return json.dumps(json.loads(tokenizer.to_str()), indent=1, ensure_ascii=False)


def _pieces(data: bytes) -> Iterator[str]:
    """The UTF-8 text in pieces of whole lines, except for very long lines and runs without a space."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    text = ""
    for start in range(0, len(data), _PIECE_LETTERS):
        block = data[start : start + _PIECE_LETTERS]
        try:
            text += decoder.decode(block, final=start + len(block) == len(data))
        except UnicodeDecodeError:
            data.decode("utf-8")  # raises the error with its place in the document
            raise
        while end := _end_of_piece(text):
            yield from _without_long_runs(text[:end])
            text = text[end:]
    yield from _without_long_runs(text)


def _end_of_piece(text: str) -> int:
    """Where the first piece of `text` ends; 0 if more text is needed to say."""
    end = text.find("\n", _PIECE_LETTERS, _PIECE_LIMIT) + 1
    return end or (_PIECE_LIMIT if len(text) >= _PIECE_LIMIT else 0)


def _without_long_runs(text: str) -> Iterator[str]:
    start = 0
    for run in _LONG_RUN.finditer(text):
        yield text[start : run.end()]
        start = run.end()
    if start < len(text):
        yield text[start:]
