"""Builds token files of conversations and training sequences from them, with a loss on the answers only."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from onstep.data.chat.packing import Packing, first_fit
from onstep.data.chat.records import ChatNotes, ChatSource
from onstep.data.chat.template import EncodedChat, template_for
from onstep.data.corpus.build_cache import build_cached, write_text
from onstep.data.corpus.token_file import TokenFile, check_ids, find_token_file, token_dtype, write_tokens
from onstep.data.corpus.tokenizers import Tokenizer
from onstep.data.token_dataset import IGNORE_INDEX
from onstep.errors import DataError

_LOGGER = logging.getLogger(__name__)

_Ids = npt.NDArray[np.int64]

_FORMAT = "onstep chat 1"
_NEVER = np.iinfo(np.int64).max


class EncodedChats(Protocol):
    """Tokenized conversations: a `ChatFile`, or `ChatsInMemory`."""

    @property
    def lengths(self) -> _Ids:
        """Number of tokens in each conversation."""

    @property
    def first_trained(self) -> _Ids:
        """Offset of the first token that is a label in each conversation; far beyond its end if there is none."""

    def __len__(self) -> int:
        """Number of conversations."""

    def read(self, number: int) -> EncodedChat:
        """The tokens of one conversation."""


@dataclass
class ChatFile:
    """The tokenized conversations of a corpus. Pickled to workers as paths only.

    `values` holds ``2 * id + (1 if trained on)`` for each token of all conversations in turn; `index` holds the end of
    each conversation and the position of its first trained token.
    """

    values: TokenFile
    index: TokenFile
    notes: ChatNotes = field(default_factory=ChatNotes)
    """What its source holds."""

    def __len__(self) -> int:
        """Number of conversations."""
        return self.index.num_tokens // 2

    @property
    def lengths(self) -> _Ids:
        """Number of tokens in each conversation."""
        return np.diff(self._table[:, 0], prepend=0)

    @property
    def first_trained(self) -> _Ids:
        """Offset of the first token that is a label in each conversation; far beyond its end if there is none."""
        return self._table[:, 1]

    def read(self, number: int) -> EncodedChat:
        """The tokens of one conversation.

        Args:
            number: the index of the conversation.
        """
        start = int(self._table[number - 1, 0]) if number else 0
        values = self.values.read(start, int(self._table[number, 0])).astype(np.int64)
        return EncodedChat(values >> 1, (values & 1).astype(np.bool_))

    @property
    def _table(self) -> _Ids:
        table: _Ids = self.index.tokens.reshape(-1, 2)
        return table


class ChatsInMemory:
    """Conversations that are not in a file."""

    def __init__(self, chats: Sequence[EncodedChat]) -> None:
        self.lengths = np.array([chat.ids.size for chat in chats], dtype=np.int64)
        self.first_trained = np.array([_first_label(chat) for chat in chats], dtype=np.int64)
        self._chats = chats

    def __len__(self) -> int:
        return len(self._chats)

    def read(self, number: int) -> EncodedChat:
        """The tokens of one conversation."""
        return self._chats[number]


def _first_label(chat: EncodedChat) -> int:
    labels = chat.trained[1:]  # the first token of a conversation is never a label
    return int(labels.argmax()) + 1 if labels.any() else int(_NEVER)


def build_chat_file(
    source: ChatSource,
    tokenizer: Tokenizer,
    cache_dir: str | Path | None,
    *,
    show_progress: bool,
    wait_for_other: bool = False,
    is_said: bool = True,
) -> ChatFile:
    """The tokens of the conversations of `source`, from the cache or built now; shared as in `build_token_file`.

    A line says the form of the conversations, and what of them is not read, unless another process does.

    Args:
        is_said: False leaves that line out.
        tokenizer: the tokenizer that encodes the texts.
        cache_dir: the directory of the token cache; None is `default_cache_dir()`.
        show_progress: whether a progress bar is shown.
        wait_for_other: whether another process goes first, for some seconds: the one that shows the progress bar.

    Raises:
        DataError: for conversations that are not in the documented format, or if there are none.
    """
    template = template_for(tokenizer)

    entries: list[tuple[int, int]] = []

    def values() -> Iterator[npt.NDArray[Any]]:
        end = 0
        for messages, place in source.conversations("Tokenizing" if show_progress else None):
            chat = template.encode(messages, place)
            check_ids(chat.ids, tokenizer, place)
            end += chat.ids.size
            entries.append((end, _first_label(chat)))
            yield 2 * chat.ids + chat.trained

    def make(path: Path) -> ChatFile:
        """Write the values, then the index, without which the values are not found."""
        empty = f"the corpus is empty: no conversations in {source.name}"
        written = write_tokens(path, token_dtype(2 * tokenizer.vocab_size), values(), path.stem, empty)
        table = np.array(entries, dtype=np.int64)
        write_text(_notes_path(path), json.dumps(asdict(source.notes)))
        index = write_tokens(_index_path(path), "<i8", [table], _index_source(written), empty)
        return ChatFile(written, index, source.notes)

    described = f"{_FORMAT}\0{template.fingerprint}"
    chats = build_cached(source, described, ".tokens", cache_dir, _find, make, wait_for_other=wait_for_other)
    if is_said and not wait_for_other:
        chats.notes.say(source.name)
    return chats


def _index_path(path: Path) -> Path:
    return path.with_name(f"{path.stem}-index.tokens")


def _notes_path(path: Path) -> Path:
    return path.with_name(f"{path.stem}-notes.json")


def _find(path: Path) -> ChatFile | None:
    values, index = find_token_file(path), find_token_file(_index_path(path))
    if values is None or index is None or index.source != _index_source(values):
        return None
    try:
        notes = ChatNotes(**json.loads(_notes_path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None  # of an older version, or damaged: built again
    return ChatFile(values, index, notes)


def _index_source(values: TokenFile) -> str:
    return f"{values.source} {values.content_hash}"


class ChatDataset(Dataset[dict[str, torch.Tensor]]):
    """The conversations ``start <= c < end`` of a file, each padded to a separate sequence.

    A sample is ``{"tokens": (seq_length,), "labels": (seq_length,)}``, int64. Labels are shifted: a label is the next
    token if that belongs to the assistant (including the end token), else -100. A conversation longer than a sequence
    is truncated; one without a label is dropped. A single warning counts both.

    Args:
        end: None means up to the last conversation.
        pad_id: token used for padding, which has no label.
        warns: False leaves the warning to another rank.
        chats: the encoded conversations.
        seq_length: tokens of a sample.
        start: the index of the first conversation of this split.

    Raises:
        DataError: if no conversation has a label.
    """

    def __init__(
        self,
        chats: EncodedChats,
        seq_length: int,
        pad_id: int,
        *,
        start: int = 0,
        end: int | None = None,
        warns: bool = True,
    ) -> None:
        if seq_length < 1:
            raise DataError(f"seq_length must be >= 1, got {seq_length}")
        self.chats = chats
        self.seq_length = seq_length
        self.pad_id = pad_id
        chosen = slice(start, len(chats) if end is None else end)
        if not chats.lengths[chosen].size:
            raise DataError("it is empty; give more conversations, or set dataset.split=100,0,0 to train on all")
        # The last token of a conversation is only used as a label.
        wanted = chats.lengths[chosen] - 1
        lengths = np.minimum(wanted, seq_length)
        has_label = chats.first_trained[chosen] <= lengths
        self._numbers = start + np.flatnonzero(has_label)
        self._lengths = lengths[has_label]
        if not self._numbers.size:
            raise DataError(
                f"none of {wanted.size} conversations has an answer within the first {seq_length} tokens; give "
                "conversations with messages of role 'assistant', or increase seq_length"
            )
        self.note = _note(int((wanted[has_label] > seq_length).sum()), int((~has_label).sum()), wanted.size, seq_length)
        """How many conversations are truncated or dropped, in words; empty for none."""
        if warns and self.note:
            _LOGGER.warning("%s", self.note)

    def __len__(self) -> int:
        return int(self._numbers.size)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {key: rows[0] for key, rows in self.get_batch([index]).items()}

    def get_batch(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        """The samples at `indices` as one micro-batch, each entry ``(batch, seq_length)``."""
        tokens, labels = self._empty(len(indices))
        for row, index in enumerate(indices):
            if not 0 <= index < len(self):
                raise IndexError(f"sample {index} of a dataset of {len(self)}")
            self._put(index, tokens[row], labels[row])
        return {"tokens": torch.from_numpy(tokens), "labels": torch.from_numpy(labels)}

    def _empty(self, num_rows: int) -> tuple[_Ids, _Ids]:
        shape = (num_rows, self.seq_length)
        return np.full(shape, self.pad_id, dtype=np.int64), np.full(shape, IGNORE_INDEX, dtype=np.int64)

    def _put(self, index: int, tokens: _Ids, labels: _Ids) -> int:
        """Write a conversation to the start of `tokens` and `labels`; returns the number of positions used."""
        length = int(self._lengths[index])
        ids, trained = self.chats.read(int(self._numbers[index]))
        tokens[:length] = ids[:length]
        labels[:length] = np.where(trained[1 : length + 1], ids[1 : length + 1], IGNORE_INDEX)
        return length


class PackedDataset(ChatDataset):
    """The conversations of a file, packed several to a sequence where they fit.

    A sample has `tokens` and `labels` as in `ChatDataset`, plus ``document_ids`` (seq_length,), which distinguish the
    conversations and the padding, and ``position_ids`` (seq_length,), which restart at 0 in each. No conversation is
    split to fill a sequence. In stored order, each goes into the first sequence with enough room: the packing is the
    same in every epoch and on every rank, and each conversation is in exactly one sequence.

    Args:
        chats: the encoded conversations.
        seq_length: tokens of a sample.
        start: the index of the first conversation of this split.
    """

    @cached_property
    def _packing(self) -> Packing:
        return first_fit(self._lengths.tolist(), self.seq_length)

    def __len__(self) -> int:
        return len(self._packing)

    def get_batch(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        """The samples at `indices` as one micro-batch, each entry ``(batch, seq_length)``."""
        tokens, labels = self._empty(len(indices))
        documents, positions = np.zeros_like(tokens), np.zeros_like(tokens)
        counter = np.arange(self.seq_length)
        for row, index in enumerate(indices):
            if not 0 <= index < len(self):
                raise IndexError(f"sample {index} of a dataset of {len(self)}")
            at = 0
            for document, conversation in enumerate(self._packing.bin(index)):
                length = self._put(conversation, tokens[row, at:], labels[row, at:])
                # Number the rest as padding until another conversation overwrites it.
                documents[row, at + length :] = document + 1
                positions[row, at : at + length] = counter[:length]
                at += length
            positions[row, at:] = counter[: self.seq_length - at]
        arrays = {"tokens": tokens, "labels": labels, "position_ids": positions, "document_ids": documents}
        return {key: torch.from_numpy(array) for key, array in arrays.items()}


def _note(num_cut: int, num_dropped: int, total: int, seq_length: int) -> str:
    notes = []
    if num_cut:
        notes.append(f"{num_cut} are longer than seq_length={seq_length} and are truncated")
    if num_dropped:
        notes.append(f"{num_dropped} have no answer within a sequence and are dropped")
    return f"of {total} conversations, {' and '.join(notes)}" if notes else ""
