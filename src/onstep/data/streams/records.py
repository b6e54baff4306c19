"""Turns the records of a stream, texts or conversations, into samples that are packed among themselves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from onstep.config import DatasetConfig
from onstep.data.chat.dataset import ChatDataset, ChatsInMemory, PackedDataset
from onstep.data.chat.records import ChatKeys
from onstep.data.chat.template import ChatTemplate, EncodedChat, template_for
from onstep.data.corpus.documents import Document, read_record, text_of_record
from onstep.data.corpus.token_file import check_ids, encode_document, token_dtype
from onstep.data.corpus.tokenizers import Tokenizer
from onstep.data.token_dataset import IGNORE_INDEX, Boundaries, TokenDataset
from onstep.errors import DataError

C = TypeVar("C")
E = TypeVar("E")

Ids = npt.NDArray[Any]


class Records(Protocol, Generic[C, E]):
    """The records of a stream of one kind: C is what a record holds, E the same in tokens."""

    def columns(self, names: Sequence[str], file: str) -> Sequence[str]:
        """The columns to read of a file with these.

        Raises:
            DataError: if what is needed is not among them.
        """

    def content(self, row: Any, place: str) -> C:
        """What a row holds: a line of JSON, or a dict.

        Raises:
            DataError: with `place`, for a row that is damaged or has not what is needed.
        """

    def key(self, content: C) -> bytes:
        """What the record is known by, wherever it is stored."""

    def encode(self, content: C, place: str) -> E:
        """The tokens of a record.

        Raises:
            DataError: with `place`, for a record that cannot be encoded.
        """

    def num_samples(self, encoded: Sequence[E]) -> int:
        """How many samples some records fill, at most."""

    def pack(self, encoded: Sequence[E]) -> Any:
        """A map-style dataset of some records; None if they have no label."""


class Texts:
    """Texts, each followed by the end token, as sequences that start where the one before ended."""

    def __init__(self, config: DatasetConfig, tokenizer: Tokenizer, boundaries: Boundaries | None) -> None:
        self._key = config.text_key
        self._seq_length = config.seq_length
        self._tokenizer = tokenizer
        self._boundaries = boundaries
        self._dtype = token_dtype(tokenizer.vocab_size)

    def columns(self, names: Sequence[str], file: str) -> Sequence[str]:
        """The column of the text."""
        if self._key not in names:
            columns = ", ".join(map(repr, names)) or "none"
            raise DataError(f"{file} has no column {self._key!r} (its columns: {columns}); set dataset.text_key")
        return [self._key]

    def content(self, row: Any, place: str) -> bytes:
        """The text."""
        return text_of_record(_record(row, place, f"an object with {self._key!r}"), place, self._key)

    def key(self, content: bytes) -> bytes:
        """The text itself."""
        return content

    def encode(self, content: bytes, place: str) -> Ids:
        """The ids of a text and the end token; none for an empty text."""
        ids = encode_document(self._tokenizer, Document(content, place)) if content else np.empty(0, dtype=np.int64)
        end = [] if self._tokenizer.eos_id is None or not ids.size else [self._tokenizer.eos_id]
        return np.concatenate((ids, np.array(end, dtype=np.int64))).astype(self._dtype)

    def num_samples(self, encoded: Sequence[Ids]) -> int:
        """As many as all tokens fill."""
        return sum(ids.size for ids in encoded) // self._seq_length

    def pack(self, encoded: Sequence[Ids]) -> FilledDataset | None:
        """The sequences of some texts, none of whose tokens is left out."""
        tokens = np.concatenate(encoded) if encoded else np.empty(0, dtype=self._dtype)
        if tokens.size < 2:
            return None
        return FilledDataset(tokens, self._seq_length, self._tokenizer.eos_id or 0, self._boundaries)


class Chats:
    """Conversations, with a loss on the answers."""

    def __init__(self, config: DatasetConfig, tokenizer: Tokenizer) -> None:
        self._keys = ChatKeys(config.messages_key, config.prompt_key, config.response_key)
        self._seq_length = config.seq_length
        self._tokenizer = tokenizer
        self._kind = PackedDataset if config.packing else ChatDataset

    def columns(self, names: Sequence[str], file: str) -> Sequence[str]:
        """The columns of conversations in one of their forms."""
        found = [name for name in self._keys.columns(names) if name in names]
        if not found:
            raise DataError(
                f"{file} has no column of conversations (its columns: {', '.join(map(repr, names)) or 'none'}); set "
                "dataset.messages_key, or dataset.prompt_key and dataset.response_key"
            )
        return found

    def content(self, row: Any, place: str) -> list[Any]:
        """The messages."""
        return self._keys.read(_record(row, place, "one JSON object"), place)

    def key(self, content: list[Any]) -> bytes:
        """The messages as JSON."""
        return json.dumps(content, sort_keys=True, default=str).encode()

    def encode(self, content: list[Any], place: str) -> EncodedChat:
        """The ids of a conversation, as its template renders it."""
        chat = self._template.encode(content, place)
        check_ids(chat.ids, self._tokenizer, place)
        return chat

    def num_samples(self, encoded: Sequence[EncodedChat]) -> int:
        """One for each, as if they were not packed."""
        return len(encoded)

    def pack(self, encoded: Sequence[EncodedChat]) -> ChatDataset | None:
        """The sequences of the conversations that have an answer within one."""
        chats = ChatsInMemory(encoded)
        if not (chats.first_trained <= np.minimum(chats.lengths - 1, self._seq_length)).any():
            return None
        return self._kind(chats, self._seq_length, self._tokenizer.eos_id or 0, warns=False)

    @cached_property
    def _template(self) -> ChatTemplate:
        return template_for(self._tokenizer)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_template"}


class FilledDataset(TokenDataset):
    """Sequences of all of some tokens; the rest of the last one is filled with `pad_id`, without a label."""

    def __init__(self, tokens: Ids, seq_length: int, pad_id: int, boundaries: Boundaries | None = None) -> None:
        self._num_labels = tokens.size - 1
        filled = np.full(-(-self._num_labels // seq_length) * seq_length + 1, pad_id, dtype=tokens.dtype)
        filled[: tokens.size] = tokens
        super().__init__(_TokensInMemory(filled), 0, filled.size, seq_length, boundaries)

    def get_batch(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        """The samples at `indices` as one micro-batch, each entry ``(batch, seq_length)``."""
        batch = super().get_batch(indices)
        for row, index in enumerate(indices):
            batch["labels"][row, max(self._num_labels - index * self.seq_length, 0) :] = IGNORE_INDEX
        return batch


class _TokensInMemory:
    def __init__(self, tokens: Ids) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return int(self._tokens.size)

    def read(self, start: int, stop: int) -> Ids:
        return self._tokens[start:stop]


def _record(row: Any, place: str, rule: str) -> dict[str, Any]:
    """A row as a dict; a line of JSON is parsed."""
    return read_record(row, place, rule) if isinstance(row, bytes) else row
