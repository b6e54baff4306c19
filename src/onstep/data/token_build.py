"""Makes the token file of a corpus, once for all processes and runs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from onstep.data.corpus import Document, not_utf8
from onstep.data.made_once import cache_folder, made_once
from onstep.data.sources import DocumentSource, FileSource
from onstep.data.token_file import TokenFile, find_token_file, token_dtype, write_tokens
from onstep.data.tokenizers import Tokenizer
from onstep.errors import DataError
from onstep.pulse import PULSE

_FORMAT = "onstep tokens 1"


def build_token_file(
    files: Sequence[Path],
    tokenizer: Tokenizer,
    cache_dir: str | Path | None,
    text_key: str,
    *,
    show_progress: bool,
    wait_for_other: bool = False,
) -> TokenFile:
    """The token file of `files`, from the cache or made now.

    Any number of processes may call this at once: one makes the file under a lock and the others wait for it. A broken
    file is made again. ``wait_for_other`` lets another process go first (the one that shows the progress bar).

    Args:
        cache_dir: where token files are kept; None is `default_cache_dir()`.
        text_key: key of a JSONL record that holds the text.

    Raises:
        DataError: for a corpus that is empty, unreadable or not text, and for a cache that cannot be written.
    """
    source = FileSource(files, text_key)
    return tokens_of(source, tokenizer, cache_dir, show_progress=show_progress, wait_for_other=wait_for_other)


def tokens_of(
    source: DocumentSource,
    tokenizer: Tokenizer,
    cache_dir: str | Path | None,
    *,
    show_progress: bool,
    wait_for_other: bool = False,
) -> TokenFile:
    """The token file of the documents of `source`; else as `build_token_file`.

    Raises:
        DataError: as `build_token_file`.
    """
    digest = hashlib.blake2b(f"{_FORMAT}\0{tokenizer.fingerprint}\0{tokenizer.eos_id}".encode(), digest_size=16)
    source.add_to(digest)
    label = "Tokenizing" if show_progress else None
    path = cache_folder(cache_dir) / f"{digest.hexdigest()}.tokens"

    def make() -> TokenFile:
        documents = (encoded(tokenizer, document) for document in source.documents(label))
        dtype, empty = token_dtype(tokenizer.vocab_size), f"the corpus is empty: no text in {source.name}"
        return write_tokens(path, dtype, documents, digest.hexdigest(), f"{empty}; give files with text")

    return made_once(path, lambda: find_token_file(path), make, wait_for_other=wait_for_other)


def encoded(tokenizer: Tokenizer, document: Document) -> npt.NDArray[Any]:
    """The ids of a document, with the end token where the tokenizer has one.

    Raises:
        DataError: where it is not UTF-8 and must be, or gives ids that the vocabulary does not have.
    """
    PULSE.beats += 1
    try:
        ids = np.asarray(tokenizer.encode(document.data))
    except UnicodeDecodeError as error:
        raise not_utf8(document, error) from error
    if ids.size and not (ids.min() >= 0 and ids.max() < tokenizer.vocab_size):
        raise DataError(
            f"{document.place} has token ids from {ids.min()} to {ids.max()}, but they must be >= 0 and below the "
            f"tokenizer's vocab_size {tokenizer.vocab_size}; check the tokenizer"
        )
    # As uint32, because the end token need not fit the type that the tokenizer gave.
    return ids if tokenizer.eos_id is None else np.append(ids, np.uint32(tokenizer.eos_id))
