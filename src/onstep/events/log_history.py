"""Holds the records of a run for `state.log_history`; those before a resume are read when somebody looks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Record = dict[str, Any]


class LogHistory:
    """The records of a run in the order of their steps: a list, of which the first part may still be in a file."""

    def __init__(self) -> None:
        self.final_metrics: Record | None = None
        """The newest record with the totals of a `train()`; None until there is one."""
        self.losses_at_exit: Record = {}
        """The first and the last loss of a run that exits early, by a signal or a limit: it logs no totals."""
        self.num_saved = 0
        """Number of records at the checkpoint that the run continues from."""
        self._records: list[Record] = []
        self._num_earlier = 0
        self._read_earlier: Callable[[], list[Record]] | None = None

    def __len__(self) -> int:
        return self._num_earlier + len(self._records)

    @property
    def records(self) -> list[Record]:
        """All records, in a list that may be changed and is always the same object."""
        read, self._read_earlier, self._num_earlier = self._read_earlier, None, 0
        if read is not None:
            self._records[:0] = read()
        return self._records

    def append(self, record: Record) -> None:
        """Add a record."""
        self._records.append(record)
        if "train_runtime" in record:
            self.final_metrics = record

    def replace(self, records: list[Record]) -> None:
        """Put other records in place of all."""
        self._read_earlier, self._num_earlier = None, 0
        self._records[:] = records
        self.final_metrics = next((one for one in reversed(records) if "train_runtime" in one), self.final_metrics)

    def begin_with(self, number: int, read: Callable[[], list[Record] | None]) -> None:
        """Put `number` records in place of all; `read` is called when somebody looks at them.

        If it returns None, those that were there before remain.
        """
        known = self._records[:]
        self._records.clear()
        self._num_earlier = number

        def read_or_known() -> list[Record]:
            found = read()
            return known if found is None else found

        self._read_earlier = read_or_known

    def go_back(self, num_records: int, step: int) -> None:
        """Keep the first `num_records`, and of those the ones up to `step`."""
        if num_records < self._num_earlier:
            _ = self.records  # read now: the file is about to go back too
        own = self._records[: max(num_records - self._num_earlier, 0)]
        self._records[:] = [record for record in own if record["step"] <= step]
