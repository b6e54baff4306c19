"""The tokens of conversations, memory-mapped, each token with whether it is trained on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from onstep.data.chat_records import ChatSource
from onstep.data.chat_template import EncodedChat, template_for
from onstep.data.made_once import cache_folder, made_once
from onstep.data.token_file import TokenFile, find_token_file, token_dtype, write_tokens
from onstep.data.tokenizers import Tokenizer
from onstep.errors import DataError

_FORMAT = "onstep chat 1"
_NEVER = np.iinfo(np.int64).max


@dataclass
class ChatFile:
    """Conversations of a corpus. It travels to workers by its paths.

    `values` holds ``2 * id + (1 if trained on)`` for each token, one conversation after the other; `index` holds where
    each ends and where its first token stands that is trained on.
    """

    values: TokenFile
    index: TokenFile

    def __len__(self) -> int:
        """Conversations."""
        return self.index.num_tokens // 2

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each conversation."""
        return np.diff(self._table[:, 0], prepend=0)

    @property
    def first_trained(self) -> npt.NDArray[np.int64]:
        """The first token of each conversation, from its start, that is a label; far beyond its end for none."""
        return self._table[:, 1]

    def read(self, number: int) -> EncodedChat:
        """The tokens of one conversation."""
        start = int(self._table[number - 1, 0]) if number else 0
        values = self.values.read(start, int(self._table[number, 0])).astype(np.int64)
        return EncodedChat(values >> 1, (values & 1).astype(np.bool_))

    @property
    def _table(self) -> npt.NDArray[np.int64]:
        table: npt.NDArray[np.int64] = self.index.tokens.reshape(-1, 2)
        return table


def build_chat_file(
    source: ChatSource,
    tokenizer: Tokenizer,
    cache_dir: str | Path | None,
    *,
    show_progress: bool,
    wait_for_other: bool = False,
) -> ChatFile:
    """The tokens of the conversations of `source`, from the cache or made now; see `build_token_file` for the sharing.

    Raises:
        DataError: for conversations that are not of the documented form, or none at all.
    """
    template = template_for(tokenizer)
    digest = hashlib.blake2b(f"{_FORMAT}\0{template.fingerprint}".encode(), digest_size=16)
    source.add_to(digest)
    key = digest.hexdigest()
    folder = cache_folder(cache_dir)
    path = folder / f"{key}.tokens"

    def make() -> ChatFile:
        return _build(path, key, source, tokenizer, "Tokenizing" if show_progress else None)

    return made_once(path, lambda: _find(path), make, wait_for_other=wait_for_other)


def _first_label(chat: EncodedChat) -> int:
    """The first token that can be a label; the very first token of a conversation follows nothing."""
    labels = chat.trained[1:]
    return int(labels.argmax()) + 1 if labels.any() else _NEVER


def _index_path(path: Path) -> Path:
    return path.with_name(f"{path.stem}-index.tokens")


def _find(path: Path) -> ChatFile | None:
    values, index = find_token_file(path), find_token_file(_index_path(path))
    if values is None or index is None or index.source != _index_source(values):
        return None
    return ChatFile(values, index)


def _index_source(values: TokenFile) -> str:
    return f"{values.source} {values.content_hash}"


def _build(path: Path, key: str, source: ChatSource, tokenizer: Tokenizer, label: str | None) -> ChatFile:
    """Writes the values, then the index, without which they are not found."""
    template, entries, empty = template_for(tokenizer), [], f"the corpus is empty: no conversations in {source.name}"

    def values() -> Iterator[npt.NDArray[Any]]:
        end = 0
        for messages, place in source.conversations(label):
            chat = template.encode(messages, place)
            if chat.ids.size and not (chat.ids.min() >= 0 and chat.ids.max() < tokenizer.vocab_size):
                raise DataError(
                    f"{place} has token ids from {chat.ids.min()} to {chat.ids.max()}, but they must be >= 0 and below "
                    f"the tokenizer's vocab_size {tokenizer.vocab_size}; check the tokenizer"
                )
            end += chat.ids.size
            entries.append((end, _first_label(chat)))
            yield 2 * chat.ids + chat.trained

    written = write_tokens(path, token_dtype(2 * tokenizer.vocab_size), values(), key, empty)
    table = np.array(entries, dtype=np.int64)
    return ChatFile(written, write_tokens(_index_path(path), "<i8", [table], _index_source(written), empty))
