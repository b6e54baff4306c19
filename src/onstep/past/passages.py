"""Remembers passages of token sequences, to find text that was seen before at whatever position."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_LENGTH = 16
"""Tokens of a passage."""
_ONE_IN = 4
"""Of all passages that begin at a token, one in so many is remembered; its tokens decide, not its position."""
_LEAST = 3
"""A text with fewer of these is not compared."""
_FACTORS = np.random.default_rng(0).integers(1, 2**63, _LENGTH, dtype=np.uint64) | np.uint64(1)

_Hashes = npt.NDArray[np.uint64]


class Passages:
    """The passages of the sequences of the repeated steps."""

    def __init__(self) -> None:
        self._seen: list[tuple[_Hashes, int, int | None]] = []

    def add(self, tokens: npt.NDArray[Any], step: int, index: int | None) -> None:
        """Remember a sequence of a step, with its index in the dataset."""
        self._seen.append((_passages(tokens), step, index))

    def extend(self, others: Passages) -> None:
        """Remember what others have."""
        self._seen += others._seen

    def shared(self, tokens: npt.NDArray[Any], own_index: int | None, own_step: int) -> tuple[float, str]:
        """The share of a sequence's passages that others had, and the sequence with most of them in words."""
        own = _passages(tokens)
        if own.size < _LEAST:
            return 0.0, ""
        whole = np.zeros(own.size, dtype=np.bool_)
        most, words = 0, ""
        for hashes, step, index in self._seen:
            if index == own_index if index is not None else step == own_step:
                continue
            found = np.isin(own, hashes, assume_unique=True)
            whole |= found
            if (count := int(found.sum())) > most:
                most = count
                words = f"a sample of step {step}{'' if index is None else f' (index {index})'}"
        return float(whole.mean()), words


def _passages(tokens: npt.NDArray[Any]) -> _Hashes:
    """Hashes of some passages, each once."""
    if tokens.size < _LENGTH:
        return np.zeros(0, dtype=np.uint64)
    windows = np.lib.stride_tricks.sliding_window_view(tokens.astype(np.uint64) + np.uint64(1), _LENGTH)
    hashes = (windows * _FACTORS).sum(axis=1, dtype=np.uint64)
    hashes ^= hashes >> np.uint64(29)
    return np.unique(hashes[hashes % np.uint64(_ONE_IN) == 0])
