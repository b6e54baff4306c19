"""Finds where samples of a configured dataset come from: the file and offset, line, row or document in it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from onstep.config import DatasetConfig
from onstep.data import BlendedDataset, ChatDataset, IndexedFile, PackedDataset, TokenDataset, Tokenizer
from onstep.data.corpus.documents import Document, DocumentSource, FileSource, iter_file_documents
from onstep.data.corpus.text_files import is_jsonl
from onstep.data.datasets import chat_source, tokenizer_source

_BLOCK = 1 << 22
"""Tokens that are searched for ends of documents at once."""


@dataclass
class Sources:
    """Finds the places of samples; what it needs of the corpus is read once for all of them."""

    config: DatasetConfig
    dataset: Any
    """What the loader reads."""
    tokenizer: Tokenizer
    """With which its tokens were made."""

    def places(self, indices: Sequence[int], counts: Sequence[int]) -> list[list[str]]:
        """The places of each sample's documents in words; an empty list where they are unknown.

        Args:
            indices: of samples.
            counts: the number of documents in each.
        """
        found: list[list[str]] = [[] for _ in indices]
        texts: list[tuple[int, TokenDataset, int, int]] = []
        for number, (index, count) in enumerate(zip(indices, counts, strict=True)):
            dataset, sample = self.dataset, index
            while isinstance(dataset, BlendedDataset):
                part, sample = dataset.locate(sample)
                dataset = dataset.datasets[part]
            if isinstance(dataset, ChatDataset):
                items = dataset._packing.bin(sample) if isinstance(dataset, PackedDataset) else [sample]
                found[number] = self._conversations([int(dataset._numbers[one]) for one in items])
            elif isinstance(dataset, TokenDataset):
                first = dataset.start + sample * dataset.seq_length
                if isinstance(dataset.token_file, IndexedFile):
                    found[number] = _indexed(dataset.token_file, first, count)
                else:
                    texts.append((number, dataset, first, count))
        for number, places in self._texts(texts):
            found[number] = places
        return found

    def _texts(self, wanted: Sequence[tuple[int, TokenDataset, int, int]]) -> Iterator[tuple[int, list[str]]]:
        """The documents of samples of a tokenized corpus, in one pass over it."""
        if not wanted:
            return
        ends = self._ends
        firsts = {number: int(np.searchsorted(ends, first)) for number, _, first, _ in wanted}
        needed = {firsts[number] + more for number, _, _, count in wanted for more in range(max(count, 1))}
        source = tokenizer_source(self.config)
        documents = {at: one for at, one in enumerate(islice(_documents(source), max(needed) + 1)) if at in needed}
        for number, dataset, first, count in wanted:
            tokens = f"tokens {first:,} to {first + dataset.seq_length - 1:,}"
            at = firsts[number]
            begin = int(ends[at - 1]) + 1 if at and at <= ends.size else 0
            offset = None if at not in documents else self._offset(documents[at], dataset, first, begin)
            if offset is None:
                yield number, [tokens]
            else:
                later = (documents[at + more].place for more in range(1, count) if at + more in documents)
                yield number, [f"{documents[at].place}, byte {offset:,} ({tokens})", *later]

    @cached_property
    def _ends(self) -> npt.NDArray[np.int64]:
        """The positions of the end tokens of the corpus."""
        dataset = self.dataset
        while isinstance(dataset, BlendedDataset):
            dataset = dataset.datasets[0]
        end_id, file = self.tokenizer.eos_id, dataset.token_file
        if end_id is None:
            return np.zeros(0, dtype=np.int64)
        blocks = range(0, len(file), _BLOCK)
        found = [
            start + np.flatnonzero(np.asarray(file.read(start, min(start + _BLOCK, len(file)))) == end_id)
            for start in blocks
        ]
        return np.concatenate(found) if found else np.zeros(0, dtype=np.int64)

    def _offset(self, document: Document, dataset: TokenDataset, first: int, begin: int) -> int | None:
        """The byte of a document's text at token `first`; None if the tokens there are not those of the document."""
        data = document.data or Path(document.path).read_bytes()
        ids = np.asarray(self.tokenizer.encode(data))
        if self.tokenizer.eos_id is None and begin == 0 and first >= ids.size:
            return None  # nothing marks where documents end
        length = min(ids.size - (first - begin), dataset.seq_length)
        if length < 0 or not np.array_equal(
            ids[first - begin :][:length], dataset.token_file.read(first, first + length)
        ):
            return None  # an end token within a text
        is_of_bytes = ids.dtype == np.uint8
        text = "" if is_of_bytes else self.tokenizer.decode(ids[: first - begin].tolist())
        return first - begin if is_of_bytes else len(text.encode("utf-8", "surrogatepass"))

    def _conversations(self, numbers: Sequence[int]) -> list[str]:
        conversations = chat_source(self.config).conversations(None)
        places = {number: place for number, (_, place) in enumerate(islice(conversations, max(numbers) + 1))}
        return [places.get(number, f"conversation {number}") for number in numbers]


def _indexed(file: IndexedFile, first: int, count: int) -> list[str]:
    low, high = 0, file.num_documents
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if file.document_start(middle) <= first else (low, middle)
    offset = first - file.document_start(low)
    more = (f"{file.tokens_path}, document {low + one}" for one in range(1, count))
    return [f"{file.tokens_path}, document {low} from its token {offset:,} on (token {first:,} of the file)", *more]


def _documents(source: DocumentSource) -> Iterator[Document]:
    """The documents of a source that are not empty; those that are whole files are not read."""
    if not isinstance(source, FileSource):
        yield from source.documents(None)
        return
    for path in source.files:
        if is_jsonl(path):
            yield from _not_empty(iter_file_documents(path, source.text_key))
        elif path.stat().st_size:
            yield Document(b"", path)


def _not_empty(documents: Iterable[Document]) -> Iterator[Document]:
    return (one for one in documents if one.data)
