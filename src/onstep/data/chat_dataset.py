"""Training sequences of conversations, with a loss on the answers."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from onstep.data.boundaries import IGNORE_INDEX
from onstep.data.chat_file import ChatFile
from onstep.data.packing import first_fit
from onstep.errors import DataError

_LOGGER = logging.getLogger(__name__)

_Ids = npt.NDArray[np.int64]


class ChatDataset(Dataset[dict[str, torch.Tensor]]):
    """The conversations ``start <= c < end`` of a file, each padded to a sequence of its own.

    A sample is ``{"tokens": (seq_length,), "labels": (seq_length,)}``, int64. Labels are shifted: each is the next
    token where that is the assistant's, its end token included, else -100. A conversation that is longer than a
    sequence loses its end; one without a label is left out. Both are counted in one warning.

    Args:
        end: None is the last conversation.
        pad_id: token that fills a sequence, without a label.
        warns: False leaves the warning to another rank.

    Raises:
        DataError: where no conversation has a label.
    """

    def __init__(
        self,
        chats: ChatFile,
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
            raise DataError("it is empty; give more conversations, or no share to evaluate on: dataset.split=100,0,0")
        # The last token of a conversation is only a label.
        wanted = chats.lengths[chosen] - 1
        lengths = np.minimum(wanted, seq_length)
        has_label = chats.first_trained[chosen] <= lengths
        self._numbers = start + np.flatnonzero(has_label)
        self._lengths = lengths[has_label]
        if not self._numbers.size:
            raise DataError(
                f"none of {wanted.size} conversations has an answer within the first {seq_length} tokens; give "
                "conversations with messages of the role 'assistant', or a longer seq_length"
            )
        if warns:
            _warn(int((wanted[has_label] > seq_length).sum()), int((~has_label).sum()), wanted.size, seq_length)

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
        """Write a conversation to the start of `tokens` and `labels`; gives the positions that it takes."""
        length = int(self._lengths[index])
        ids, trained = self.chats.read(int(self._numbers[index]))
        tokens[:length] = ids[:length]
        labels[:length] = np.where(trained[1 : length + 1], ids[1 : length + 1], IGNORE_INDEX)
        return length


class PackedDataset(ChatDataset):
    """The conversations of a file, several in one sequence where they fit.

    A sample is `tokens` and `labels` as in `ChatDataset`, with ``document_ids`` (seq_length,) that tell conversations
    apart, padding too, and ``position_ids`` (seq_length,) that begin at 0 in each. None is cut to fill a sequence. Each
    goes, in stored order, into the first sequence that has room for it: the same in every epoch and on every rank, and
    each conversation is in exactly one.
    """

    def __init__(
        self,
        chats: ChatFile,
        seq_length: int,
        pad_id: int,
        *,
        start: int = 0,
        end: int | None = None,
        warns: bool = True,
    ) -> None:
        super().__init__(chats, seq_length, pad_id, start=start, end=end, warns=warns)
        self._packing = first_fit(self._lengths.tolist(), seq_length)

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
                # What follows is numbered as padding, until another conversation takes its place.
                documents[row, at + length :] = document + 1
                positions[row, at : at + length] = counter[:length]
                at += length
            positions[row, at:] = counter[: self.seq_length - at]
        arrays = {"tokens": tokens, "labels": labels, "position_ids": positions, "document_ids": documents}
        return {key: torch.from_numpy(array) for key, array in arrays.items()}


def _warn(num_cut: int, num_dropped: int, total: int, seq_length: int) -> None:
    told = []
    if num_cut:
        told.append(f"{num_cut} are longer than seq_length={seq_length} and lose their end")
    if num_dropped:
        told.append(f"{num_dropped} have no answer within a sequence and are left out")
    if told:
        _LOGGER.warning("of %d conversations, %s", total, " and ".join(told))
