"""The tokens of a corpus in one memory-mapped file, made once and found again by their content."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_LOGGER = logging.getLogger(__name__)

_FORMAT = 1
_NUM_CHECKED_BLOCKS = 64
_CHECKED_BLOCK_BYTES = 64 * 1024
_WAIT_FOR_BUILDER_SECONDS = 5.0
_POLL_SECONDS = 0.1


@dataclass
class TokenFile:
    """The tokens of a corpus, one document after the other. Travels to workers by its path."""

    path: Path
    """The raw tokens, little-endian."""
    dtype: str
    """`<u2` or `<u4`."""
    num_tokens: int
    num_documents: int
    content_hash: str
    """Of the tokens."""
    source_hash: str
    """Of the corpus, the tokenizer and the format: the name of the file."""

    def __len__(self) -> int:
        return self.num_tokens

    @property
    def tokens(self) -> npt.NDArray[Any]:
        """All tokens ``(num_tokens,)``, mapped into memory, read-only."""
        if "_tokens" not in self.__dict__:
            # A plain array over the mapping: slicing np.memmap itself costs several times as much.
            self._tokens = np.asarray(np.memmap(self.path, dtype=self.dtype, mode="r", shape=(self.num_tokens,)))
        return self._tokens

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_tokens"}
