"""Reads any window of a stream as samples, in the training process or in workers, and the records that are held out."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, NamedTuple

from torch.utils.data import Dataset

from onstep.data.corpus.stream_files import kind_of
from onstep.data.loaders.sample_order import SampleOrder
from onstep.data.streams.line_file import LineFile
from onstep.data.streams.parquet_file import ParquetFile
from onstep.data.streams.records import Records
from onstep.errors import DataError, OnstepError
from onstep.processes.heartbeat import HEARTBEAT

_REMEDY = " (or leave such records out: dataset.stream_skip_damaged=true)"


_CHECKED_FILES = 100
_CHECKED_BYTES = 1 << 16


class WindowTask(NamedTuple):
    """A window to read."""

    file: int
    """Index of its file in stored order."""
    window: int
    order: int | None
    """A seed of the order of its records; None keeps that of the file."""


@dataclass
class Window:
    """The samples of a window."""

    samples: Any = None
    """A map-style dataset; None if there are none."""
    is_last: bool = False
    """Whether no window of its file follows."""
    damaged: list[str] = field(default_factory=list)
    """Why records were left out."""
    note: str = ""
    """What of its records is not trained on, in words."""
    problem: str | None = None
    """Why it cannot be read."""


class RecordStream(Dataset[Window]):
    """A stream of records, whose samples are read window by window; see `StreamLoader`.

    A record is in the training, validation or test set by a hash of its content, the same wherever it is stored.

    Args:
        files: in stored order.
        records: what the files hold.
        shares: of training, validation and test.
        skips_damaged: leave out records that cannot be read.
    """

    def __init__(
        self,
        files: Sequence[str],
        records: Records[Any, Any],
        window_bytes: int,
        *,
        shares: tuple[float, float, float] = (1.0, 0.0, 0.0),
        skips_damaged: bool = False,
        epoch_samples: int | None = None,
    ) -> None:
        self.files = list(files)
        self.epoch_samples = epoch_samples
        """Samples of an epoch, before they are rounded to whole steps; None for one pass over the stream."""
        self._records = records
        self._window_bytes = window_bytes
        self._shares = shares
        self._skips_damaged = skips_damaged
        self._open: tuple[int, int, LineFile | ParquetFile] | None = None

    @property
    def fingerprint(self) -> str:
        """Changes whenever a window's number could mean other records."""
        names = "\0".join(PurePath(name).name for name in self.files)
        return hashlib.blake2b(f"{names}\0{self._window_bytes}".encode(), digest_size=8).hexdigest()

    def __getitem__(self, task: WindowTask) -> Window:
        """The training samples of a window; a problem is part of the result, as workers cannot raise in one line."""
        found = Window()
        try:
            rows, found.is_last = self._rows(task.file, task.window)
            if task.order is not None:
                rows = [rows[at] for at in SampleOrder(len(rows), task.order, 0).indices(0, len(rows))]
            encoded = [one for _, one in self._encoded(rows, (0,), found.damaged)]
            found.samples = self._records.pack(encoded)
            len(found.samples or ())  # packs conversations, here instead of in the training process
            none = f"none of {len(encoded)} records has a label" if encoded else ""
            found.note = none if found.samples is None else getattr(found.samples, "note", "")
        except OnstepError as error:
            found.problem = str(error)
        return found

    def held_out(self, shares: Sequence[int], num_samples: int) -> list[Any]:
        """The first samples of the validation (1) or test (2) set, or of all records (0), in stored order.

        Returns:
            a map-style dataset for each of `shares`; None for one without a sample.

        Raises:
            DataError: for records that cannot be read.
        """
        encoded: dict[int, list[Any]] = {share: [] for share in shares}
        wanted = set(shares)
        with closing(self):
            for rows in self._all_rows():
                for share, one in self._encoded(rows, tuple(wanted), []):
                    encoded[share].append(one)
                wanted = {one for one in wanted if self._records.num_samples(encoded[one]) < num_samples}
                if not wanted:
                    break
        return [self._records.pack(encoded[share]) for share in shares]

    def check(self) -> None:
        """Read the first record of the first file and of local ones: a wrong column is found before training.

        Raises:
            DataError: for a stream without files, or with such a record that cannot be read.
        """
        if not self.files:
            raise DataError("the stream is empty: dataset.paths names no files; give parquet or JSON-lines files")
        local = [name for name in self.files if "://" not in name]
        for name in dict.fromkeys((self.files[0], *local[:_CHECKED_FILES])):
            with closing(self._reader(name, _CHECKED_BYTES)) as reader:
                rows, _ = reader.window(0)
                deque(self._encoded(rows[:1], (0, 1, 2), []), maxlen=0)

    def close(self) -> None:
        """Close the open file."""
        opened, self._open = self._open, None
        if opened is not None and opened[0] == os.getpid():
            opened[2].close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": None}

    def _all_rows(self) -> Iterator[list[tuple[str, Any]]]:
        for file in range(len(self.files)):
            is_last, window = False, 0
            while not is_last:
                rows, is_last = self._rows(file, window)
                window += 1
                yield rows

    def _rows(self, file: int, window: int) -> tuple[list[tuple[str, Any]], bool]:
        """The rows of a window. The place of a file that another process opened belongs to that process."""
        if self._open is None or self._open[:2] != (os.getpid(), file):
            self.close()
            self._open = os.getpid(), file, self._reader(self.files[file], self._window_bytes)
        try:
            return self._open[2].window(window)
        except DataError:
            self.close()
            raise

    def _reader(self, name: str, window_bytes: int) -> LineFile | ParquetFile:
        if kind_of(name)[0] == ".parquet":
            return ParquetFile(name, window_bytes, self._records.columns)
        return LineFile(name, window_bytes)

    def _encoded(
        self, rows: Sequence[tuple[str, Any]], shares: Sequence[int], damaged: list[str]
    ) -> Iterator[tuple[int, Any]]:
        """The records of some shares in tokens, with their share; why others were left out is added to `damaged`."""
        for place, row in rows:
            HEARTBEAT.beats += 1
            try:
                content = self._records.content(row, place)
                share = self._share_of(content)
                if share in shares:
                    yield share, self._records.encode(content, place)
            except DataError as error:
                if not self._skips_damaged:
                    raise DataError(str(error).removesuffix(".") + _REMEDY) from error
                damaged.append(str(error))

    def _share_of(self, content: Any) -> int:
        train, valid, _ = self._shares
        if train == 1.0:
            return 0
        digest = hashlib.blake2b(self._records.key(content), digest_size=8).digest()
        position = int.from_bytes(digest, "little") / 2**64
        return 0 if position < train else 1 if position < train + valid else 2
