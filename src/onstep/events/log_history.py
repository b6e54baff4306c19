"""Holds the records of a run for `state.log_history`; those before a resume are read when somebody looks."""

from __future__ import annotations

from collections.abc import Callable

from onstep.record.kinds import Metrics

Record = Metrics

MOST_RECORDS = 20_000
"""Records that are kept, of 1 to 3 kB each; the metrics log has them all."""


class LogHistory:
    """The records of a run in the order of their steps: a list, of which the first part may still be in a file.

    Beyond `MOST_RECORDS`, every other one of the older training records is dropped, again and again; evaluations,
    totals and anomalies remain, as long as they are fewer.
    """

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
            self._thin_out()
        return self._records

    def append(self, record: Record) -> None:
        """Add a record."""
        self._records.append(record)
        if len(self._records) > MOST_RECORDS:
            self._thin_out()
        if "train_runtime" in record:
            self.final_metrics = record

    def _thin_out(self) -> None:
        while len(self._records) > MOST_RECORDS:
            older = range(len(self._records) * 3 // 4)
            plain = [at for at in older if _is_plain(self._records[at])]
            dropped = set((plain if len(plain) > MOST_RECORDS // 4 else older)[1::2])
            self._records[:] = [record for at, record in enumerate(self._records) if at not in dropped]

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


def _is_plain(record: Record) -> bool:
    """Whether it is that of a logged step, and of nothing else."""
    return "loss" in record and "anomaly" not in record and not any(name.startswith("eval_") for name in record)
