"""Reads and writes Megatron's `.bin` and `.idx` files.

`PREFIX.bin` holds the token ids of all sequences, raw and little-endian. `PREFIX.idx` describes them, all fields
little-endian and without padding:

| bytes | what |
|---|---|
| 9 | `MMIDIDX` and two zero bytes |
| 8 | version, uint64: 1 |
| 1 | dtype of the ids: 1 uint8, 2 int8, 3 int16, 4 int32, 5 int64, 6 float64, 7 float32, 8 uint16 |
| 8 | number of sequences `n`, uint64 |
| 8 | number of document indices `d`, uint64: number of documents plus 1 |
| 4n | number of ids of each sequence, int32 |
| 8n | where each sequence begins in the `.bin`, in bytes, int64 |
| 8d | the first sequence of each document, int64; the last entry is `n` |
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from onstep.errors import DataError
from onstep.files.bounded_reading import open_file
from onstep.files.durability import replacing

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_TYPES = {1: "|u1", 2: "|i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_CHECKED_AT_ONCE = 1 << 20
"""Number of sequences whose index is checked in one array operation."""


class IndexedFile:
    """The tokens of a pair of Megatron files, documents concatenated, memory-mapped without copying.

    The whole index is checked on opening, the tokens as they are read. Pickled to workers as a path only.

    Args:
        path: the common prefix of both files, or the path of either.
        vocab_size: exclusive upper bound of the ids; None disables the check.

    Raises:
        DataError: for a file that is missing, truncated, or not of this format.
    """

    def __init__(self, path: str | os.PathLike[str], vocab_size: int | None = None) -> None:
        self.index_path, self.tokens_path = paths_of(path)
        for file in (self.index_path, self.tokens_path):
            if not file.is_file():
                raise DataError(
                    f"{file} is missing; with kind=megatron, dataset.paths must name pairs of files by their prefix "
                    "(without .bin or .idx)"
                )
        self._vocab_size = vocab_size
        self.dtype, num_sequences, num_indices = _read_header(self.index_path)
        lengths_at = _HEADER.size
        pointers_at = lengths_at + 4 * num_sequences
        documents_at = pointers_at + 8 * num_sequences
        self._lengths = self._part("<i4", lengths_at, num_sequences)
        self._pointers = self._part("<i8", pointers_at, num_sequences)
        self._documents = self._part("<i8", documents_at, num_indices)
        self._tokens = self._map_tokens()
        is_in_order = self._check_sequences()
        self._check_documents()
        # In files written front to back, the pointers are the running sum of the lengths: no array is needed.
        self._starts = None if is_in_order else np.concatenate([[0], np.cumsum(self._lengths, dtype=np.int64)])
        self._num_tokens = int(self._tokens.size if self._starts is None else self._starts[-1])

    def __len__(self) -> int:
        """Number of tokens in all documents."""
        return self._num_tokens

    def __reduce__(self) -> tuple[type[IndexedFile], tuple[Path, int | None]]:
        return IndexedFile, (self.index_path, self._vocab_size)

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return self._documents.size - 1

    def document_start(self, document: int) -> int:
        """The index of a document's first token; for `num_documents`, the end of the last document.

        Args:
            document: the index of the document.
        """
        sequence = int(self._documents[document])
        if self._starts is not None:
            return int(self._starts[sequence])
        is_end = sequence == self._pointers.size
        return self._num_tokens if is_end else int(self._pointers[sequence]) // self.dtype.itemsize

    def document(self, number: int) -> npt.NDArray[Any]:
        """The ids of one document.

        Args:
            number: the index of the document.
        """
        return self.read(self.document_start(number), self.document_start(number + 1))

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """The tokens ``start <= t < stop`` of the concatenated documents.

        Raises:
            DataError: for an id outside the vocabulary.
        """
        tokens = self._tokens[start:stop] if self._starts is None else self._gather(start, stop)
        if self._vocab_size is not None and tokens.size:
            low, high = int(tokens.min()), int(tokens.max())
            if low < 0 or high >= self._vocab_size:
                raise DataError(
                    f"{self.tokens_path} has token ids from {low} to {high} between tokens {start} and {stop}, but the "
                    f"model's vocabulary has {self._vocab_size}; set the tokenizer that the files were made with, or "
                    "model.vocab_size"
                )
        return tokens

    def _gather(self, start: int, stop: int) -> npt.NDArray[Any]:
        assert self._starts is not None
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        pieces = []
        while start < stop:
            begin, end = int(self._starts[first]), min(stop, int(self._starts[first + 1]))
            at = int(self._pointers[first]) // self.dtype.itemsize
            pieces.append(self._tokens[at + start - begin : at + end - begin])
            start, first = end, first + 1
        return np.concatenate(pieces) if pieces else np.empty(0, self.dtype)

    def _part(self, dtype: str, offset: int, count: int) -> npt.NDArray[Any]:
        if count == 0:
            raise DataError(f"{self.index_path} has no {'documents' if dtype == '<i8' else 'sequences'}; rebuild it")
        return np.asarray(np.memmap(self.index_path, dtype=dtype, mode="r", offset=offset, shape=(count,)))

    def _map_tokens(self) -> npt.NDArray[Any]:
        size = self.tokens_path.stat().st_size
        if size == 0 or size % self.dtype.itemsize:
            raise DataError(
                f"{self.tokens_path} has {size} bytes, which must be a positive multiple of {self.dtype.itemsize}; "
                "it is empty, truncated or belongs to another index"
            )
        return np.asarray(np.memmap(self.tokens_path, dtype=self.dtype, mode="r"))

    def _check_sequences(self) -> bool:
        """Whether the sequences are contiguous, in order and without gaps."""
        size, width = self._tokens.size * self.dtype.itemsize, self.dtype.itemsize
        expected, is_in_order = 0, True
        for at in range(0, self._lengths.size, _CHECKED_AT_ONCE):
            lengths = self._lengths[at : at + _CHECKED_AT_ONCE].astype(np.int64) * width
            pointers = self._pointers[at : at + _CHECKED_AT_ONCE]
            if lengths.min() < 0 or pointers.min() < 0 or (pointers % width).any():
                raise DataError(f"{self.index_path} is damaged: it has impossible lengths or offsets of sequences")
            beyond = pointers > size - lengths  # the sum of both could overflow
            if beyond.any():
                last = (pointers[beyond].astype(object) + lengths[beyond].astype(object)).max()
                raise DataError(
                    f"{self.tokens_path} has {size} bytes, but its index lists sequences up to byte {last}; it is "
                    "truncated or belongs to another index"
                )
            starts = expected + np.concatenate([[0], np.cumsum(lengths)])
            is_in_order = is_in_order and bool((starts[:-1] == pointers).all())
            expected = int(starts[-1])
        if is_in_order and expected != size:
            raise DataError(
                f"{self.tokens_path} has {size} bytes, but its index lists {expected}; it belongs to another index"
            )
        return is_in_order

    def _check_documents(self) -> None:
        documents = self._documents
        first, last, count = int(documents[0]), int(documents[-1]), self._lengths.size
        if first != 0 or last != count or (documents[1:] < documents[:-1]).any():
            raise DataError(
                f"{self.index_path} is damaged: the document indices must begin at 0, increase and end at {count}, "
                f"got {first} to {last}"
            )


def write_indexed_dataset(
    prefix: str | os.PathLike[str], documents: Iterable[Any], *, vocab_size: int, end_id: int | None = None
) -> IndexedFile:
    """Write `PREFIX.bin` and `PREFIX.idx`, one sequence per document, for `IndexedFile` and Megatron.

    Like Megatron, stores ids as uint16 if the vocabulary has fewer than 65,500 tokens, else as int32. The index is
    written last, so an interrupted writer leaves nothing that looks complete.

    Args:
        documents: the ids of each document, one-dimensional; consumed one at a time.
        vocab_size: exclusive upper bound of the ids.
        end_id: appended to each document; None appends nothing.
        prefix: the path without `.bin` and `.idx`.

    Raises:
        DataError: for an id outside the vocabulary, or if there are no documents.
    """
    index_path, tokens_path = paths_of(prefix)
    code = 8 if vocab_size < 65_500 else 4
    dtype = np.dtype(_TYPES[code])
    lengths: list[int] = []
    index_path.unlink(missing_ok=True)
    with tokens_path.open("wb") as out:
        for ids in _checked(documents, vocab_size, end_id):
            out.write(ids.astype(dtype).tobytes())
            lengths.append(ids.size)
    if not sum(lengths):
        raise DataError(f"there are no documents for {tokens_path}; give at least one non-empty document")
    sizes = np.array(lengths, dtype=np.int64) * dtype.itemsize
    with replacing(index_path) as temporary, temporary.open("wb") as out:
        out.write(_HEADER.pack(_MAGIC, _VERSION, code, len(lengths), len(lengths) + 1))
        out.write(np.array(lengths, dtype="<i4").tobytes())
        out.write((np.cumsum(sizes) - sizes).astype("<i8").tobytes())
        out.write(np.arange(len(lengths) + 1, dtype="<i8").tobytes())
    return IndexedFile(index_path)


def paths_of(path: str | os.PathLike[str]) -> tuple[Path, Path]:
    """The `.idx` and the `.bin` file of a pair, from their prefix or the path of either."""
    text = os.fspath(os.path.expanduser(path))
    prefix = text[:-4] if text.endswith((".bin", ".idx")) else text
    return Path(f"{prefix}.idx"), Path(f"{prefix}.bin")


def _read_header(path: Path) -> tuple[np.dtype[Any], int, int]:
    """Dtype of the ids, number of sequences, number of document indices."""
    size = path.stat().st_size
    with open_file(path) as index:
        head = index.read(_HEADER.size)
    if not head.startswith(_MAGIC):
        raise DataError(f"{path} is not a Megatron index: it must begin with {_MAGIC[:7].decode()}, got {head[:7]!r}")
    if len(head) < _HEADER.size:
        raise DataError(f"{path} is truncated: it ends within the header of {_HEADER.size} bytes")
    _, version, code, num_sequences, num_indices = _HEADER.unpack(head)
    if version != _VERSION:
        raise DataError(f"{path} has version {version}; only version {_VERSION} is supported")
    if code not in _TYPES:
        raise DataError(f"{path} has ids of type {code}, which is not an integer type; use one of {sorted(_TYPES)}")
    expected = _HEADER.size + 12 * num_sequences + 8 * num_indices
    if size != expected:
        what = "it is truncated" if size < expected else "it holds more than text (sequence modes) or is damaged"
        raise DataError(f"{path} has {size} bytes, but its header implies {expected}; {what}")
    return np.dtype(_TYPES[code]), num_sequences, num_indices


def _checked(documents: Iterable[Any], vocab_size: int, end_id: int | None) -> Iterator[npt.NDArray[Any]]:
    ending = [] if end_id is None else [end_id]
    for number, document in enumerate(documents):
        ids = np.concatenate([np.asarray(document, dtype=np.int64), np.asarray(ending, dtype=np.int64)])
        if ids.size and not (ids.min() >= 0 and ids.max() < vocab_size):
            raise DataError(
                f"document {number} has token ids from {ids.min()} to {ids.max()}; they must be >= 0 and below "
                f"vocab_size {vocab_size}"
            )
        yield ids
