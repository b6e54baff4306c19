"""Calls the libraries `tokenizers` and `transformers`: their errors, and the settings that must not alter documents."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from onstep.errors import DataError, OnstepError

MAX_VOCAB_SIZE = 1 << 22
"""Sixteen times the largest vocabulary in use; a table of embeddings has a row for every id."""
_MAX_REASON = 1000
"""Characters of a library's error message that are kept: it may quote the file."""


@contextmanager
def explained(rule: str) -> Iterator[None]:
    """Turn whatever a library raises, panics of Rust included, into a `DataError` that begins with `rule`."""
    try:
        yield
    except OnstepError:
        raise
    except BaseException as error:
        # The class of Rust's panics derives from BaseException and cannot be imported.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = f"{type(error).__name__}: {error}"
        raise DataError(f"{rule}: {reason[:_MAX_REASON]}") from error


def switch_off_alterations(tokenizer: Any) -> list[str]:
    """Switch off what makes a `tokenizers.Tokenizer` cut, pad or randomize documents; returns what was on, in words."""
    found = []
    truncation, padding = tokenizer.truncation, tokenizer.padding
    dropout = getattr(tokenizer.model, "dropout", None)
    if truncation is not None:
        found.append(f"truncation to {truncation['max_length']} tokens")
        tokenizer.no_truncation()
    if padding is not None:
        length = padding.get("length")
        found.append("padding" if length is None else f"padding to {length} tokens")
        tokenizer.no_padding()
    if dropout:
        found.append(f"BPE dropout of {dropout:g}")
        tokenizer.model.dropout = None
    return found


def leaves_out_characters(tokenizer: Any) -> bool:
    """Whether the model of a `tokenizers.Tokenizer` drops characters that are not in its vocabulary.

    That is a BPE without an unknown token, without byte fallback and without an entry for each byte.
    """
    from tokenizers import models, pre_tokenizers

    model = tokenizer.model
    if not isinstance(model, models.BPE) or model.unk_token is not None or model.byte_fallback:
        return False
    return any(model.token_to_id(byte) is None for byte in pre_tokenizers.ByteLevel.alphabet())


def size_of_vocab(vocab: dict[str, int], path: Path) -> int:
    """The largest id plus one: ids may have gaps.

    Raises:
        DataError: for a vocabulary that is empty, or has an id that is negative or beyond `MAX_VOCAB_SIZE`.
    """
    if not vocab:
        raise DataError(f"the tokenizer in {path} has an empty vocabulary; train it first")
    for token, number in vocab.items():
        if type(number) is not int or not 0 <= number < MAX_VOCAB_SIZE:
            raise DataError(
                f"the tokenizer in {path} gives {token[:80]!r} the id {number!r}; ids must be integers >= 0 and below "
                f"{MAX_VOCAB_SIZE}; restore the file or give another one"
            )
    return max(vocab.values()) + 1
