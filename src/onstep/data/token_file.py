"""The tokens of a corpus in one memory-mapped file, with a manifest that tells whether the file is whole."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from onstep.errors import DataError

_CHECKED_BLOCKS = 64
_BLOCK_BYTES = 64 * 1024


@dataclass
class TokenFile:
    """The tokens of a corpus, one document after the other. It travels to workers by its path."""

    path: Path
    """The raw tokens, little-endian; the manifest stands beside it."""
    dtype: str
    """`<u2` or `<u4`."""
    num_tokens: int
    num_documents: int
    content_hash: str
    """Of the tokens."""
    source: str
    """Hash of the corpus, the tokenizer and the format, by which the file is found again."""

    def __len__(self) -> int:
        return self.num_tokens

    @property
    def tokens(self) -> npt.NDArray[Any]:
        """All tokens ``(num_tokens,)``, mapped into memory at first use, read-only."""
        if "_tokens" not in self.__dict__:
            # A plain array over the mapping: slicing np.memmap itself costs several times as much.
            self._tokens = np.asarray(np.memmap(self.path, dtype=self.dtype, mode="r", shape=(self.num_tokens,)))
        return self._tokens

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """The tokens ``start <= t < stop``, read-only."""
        return self.tokens[start:stop]

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_tokens"}


def token_dtype(vocab_size: int) -> str:
    """The smallest type on disk that holds every id."""
    return "<u2" if vocab_size <= 2**16 else "<u4"


def write_tokens(path: Path, dtype: str, documents: Iterable[npt.NDArray[Any]], source: str, empty: str) -> TokenFile:
    """Write `documents` one after the other to `path` and declare them whole.

    A process killed in between leaves nothing that looks whole.

    Args:
        empty: what the error says where there is not a token.

    Raises:
        DataError: where there is not a token.
    """
    manifest_path(path).unlink(missing_ok=True)
    temporary = path.with_suffix(".tokens.tmp")
    digest = hashlib.blake2b(digest_size=16)
    num_tokens = num_documents = 0
    try:
        with temporary.open("wb") as out:
            for document in documents:
                tokens = np.ascontiguousarray(document.astype(dtype))
                digest.update(tokens.data)
                out.write(tokens.data)
                num_tokens += tokens.size
                num_documents += 1
        if num_tokens == 0:
            raise DataError(empty)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    token_file = TokenFile(path, dtype, num_tokens, num_documents, digest.hexdigest(), source)
    write_manifest(token_file)
    return token_file


def write_manifest(token_file: TokenFile) -> None:
    """Declare the tokens at `token_file.path` whole. The manifest appears at once or not at all."""
    manifest = asdict(token_file) | {"path": token_file.path.name, "check": _sample_hash(token_file.path)}
    path = manifest_path(token_file.path)
    temporary = path.with_suffix(".json.tmp")
    temporary.write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    os.replace(temporary, path)


def find_token_file(path: Path) -> TokenFile | None:
    """The token file at `path`, or None where it is missing or not what its manifest says.

    The check reads the size and at most 4 MiB of blocks from all over the file.
    """
    try:
        manifest = json.loads(manifest_path(path).read_text(encoding="utf-8"))
        check = manifest.pop("check")
        token_file = TokenFile(**(manifest | {"path": path}))
        is_whole = path.stat().st_size == token_file.num_tokens * np.dtype(token_file.dtype).itemsize
        return token_file if is_whole and _sample_hash(path) == check else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):  # missing, or not a manifest that we wrote
        return None


def manifest_path(path: Path) -> Path:
    """The manifest of the tokens at `path`."""
    return path.with_suffix(".json")


def _sample_hash(path: Path) -> str:
    size = path.stat().st_size
    last = max(size - _BLOCK_BYTES, 0)
    digest = hashlib.blake2b(str(size).encode(), digest_size=16)
    with path.open("rb") as tokens:
        for offset in np.linspace(0, last, num=min(_CHECKED_BLOCKS, 1 + last), dtype=np.int64).tolist():
            tokens.seek(offset)
            digest.update(tokens.read(_BLOCK_BYTES))
    return digest.hexdigest()
