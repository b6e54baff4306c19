"""Calls the libraries `tokenizers` and `transformers`: loads tokenizers, explains errors, and checks what they read."""

from __future__ import annotations

import re
from base64 import b64decode
from collections.abc import Iterable
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

from onstep.errors import DataError, OnstepError, extra
from onstep.files.bounded_reading import MAX_JSON_BYTES, parse_json, read_bytes

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
)
"""Tokenizer files in a Hugging Face directory."""
MAX_VOCAB_SIZE = 1 << 22
"""Sixteen times the largest vocabulary in use; a table of embeddings has a row for every id."""
_MAX_GROWTH = 1000
"""Limit for how many times longer a normalizer or decoder may make a text. Rust ends the process if memory runs out."""
_CHARSMAP = re.compile(rb'"precompiled_charsmap"\s*:\s*"([A-Za-z0-9+/]{8})')
_MAX_REASON = 1000
"""Characters of a library's error message that are kept: it may quote the file."""


class Explained:
    """A context that turns whatever a library raises, panics of Rust included, into a `DataError` begun by `rule`.

    It can be entered any number of times, and costs nothing to speak of: it is around each document.
    """

    def __init__(self, rule: str) -> None:
        self._rule = rule

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, OnstepError):
            return
        # The class of Rust's panics derives from BaseException and cannot be imported.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            reason = f"{type(error).__name__}: {error}"
            raise DataError(f"{self._rule}: {reason[:_MAX_REASON]}") from error


def check_sizes(directory: Path, names: Iterable[str]) -> None:
    """Refuse a directory with a file that is too large for `transformers` to read.

    Raises:
        DataError: for a file with more bytes than the limit for JSON.
    """
    for path in (directory / name for name in names):
        size = path.stat().st_size if path.is_file() else 0
        if size > MAX_JSON_BYTES:
            raise DataError(
                f"{path} has {size:,} bytes, and at most {MAX_JSON_BYTES:,} are read; it is damaged or not the file "
                "that is meant. Restore it or give another one."
            )


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


def check_charsmap(content: bytes, path: Path) -> None:
    """Refuse a `tokenizer.json` with a table of characters that claims to be larger than the file.

    The library allocates what the table claims, and Rust ends the process if there is not so much memory.

    Raises:
        DataError: with the claim.
    """
    for found in _CHARSMAP.finditer(content):
        claimed = int.from_bytes(b64decode(found.group(1))[:4], "little")
        if claimed > len(content):
            raise DataError(
                f"{path} is damaged: its precompiled_charsmap claims {claimed:,} bytes, and the file has "
                f"{len(content):,}; restore it or give another one"
            )


def check_growth(tokenizer: Any, path: Path) -> None:
    """Refuse a `tokenizers.Tokenizer` whose normalizer or decoder could make a short text fill the memory.

    Raises:
        DataError: naming the part and the limit.
    """
    for name in ("normalizer", "decoder"):
        part = getattr(tokenizer, name)
        if part is None:
            continue
        times = _growth(parse_json(part.__getstate__(), f"the {name} of {path}", allows_repetition=True))
        if times > _MAX_GROWTH:
            raise DataError(
                f"the {name} of {path} can make a text {times:,.0f} times as long, and at most {_MAX_GROWTH} times is "
                "accepted; give a tokenizer with shorter replacements"
            )


def _growth(part: dict[str, Any]) -> float:
    """How many times as long a part of a `tokenizer.json` may make a text."""
    kind = part.get("type")
    if kind == "Sequence":
        return prod(map(_growth, part.get("normalizers") or part.get("decoders") or []))
    if kind == "Replace":
        return max(1.0, len(part["content"]) / max(1, len(part["pattern"].get("String", ""))))
    if kind == "Prepend":
        return max(1.0, len(part["prepend"]))
    return 1.0


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


def read_tokenizer_file(path: Path) -> bytes:
    """The content of a `tokenizer.json`; raises DataError if it cannot be read."""
    if path.is_dir():
        raise DataError(
            f"tokenizer_model {str(path)!r} is a directory; give its tokenizer.json, or use type huggingface"
        )
    try:
        return read_bytes(path, MAX_JSON_BYTES)
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"cannot read tokenizer file {str(path)!r}: {reason}; check tokenizer_model") from error


def load_tokenizers(path: Path, content: bytes) -> Any:
    """The `tokenizers.Tokenizer` in a file's content; raises DataError, or MissingExtraError without the library."""
    with extra("hf", "this tokenizer requires the library 'tokenizers'"):
        import tokenizers
    check_charsmap(content, path)
    with Explained(f"{path} is not a tokenizer of the `tokenizers` library; give a tokenizer.json"):
        return tokenizers.Tokenizer.from_buffer(content)


def load_transformers(path: Path) -> Any:
    """The `transformers` tokenizer of a directory; raises as `load_tokenizers`."""
    with extra("hf", "this tokenizer requires the library 'transformers'"):
        from transformers import AutoTokenizer
    check_sizes(path, [*FILES, "config.json"])
    file = path / "tokenizer.json"
    content = read_tokenizer_file(file) if file.is_file() else None
    if content is not None:
        check_charsmap(content, file)
    try:
        with Explained(f"{path} does not contain a tokenizer that transformers can load; restore it or give another"):
            return AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except DataError:
        if content is not None:
            load_tokenizers(file, content)  # says where a damaged file is wrong; transformers tells its own mistake
        raise
