"""Defines the record of a run: what happened in it, line by line, in one file that checkpoints have a position in."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from onstep.record import Record
from onstep.record.history import is_reported
from onstep.record.kinds import FILE_NAME, Kind, Listener
from onstep.record.writer import JsonLogWriter
from onstep.training.protocols import StateDict


class RunRecord:
    """`record.jsonl`: a line ``{"timestamp", "global_step", "epoch", "kind", ...}`` for everything that happens.

    Rank 0 of a run with a directory writes it. A resumed run, and one that is rolled back, continues it at the position
    of its checkpoint; what follows is moved to ``record.branch-<n>.jsonl``. See `JsonLogWriter` for what a full disk or
    a power failure can do to it.
    """

    def __init__(self) -> None:
        self._writer = _new_writer()
        self.num_reported = 0
        """Number of lines so far, with those that were lost since, that belong to `log_history`; that has more if an
        earlier version began the run."""
        self.listeners: set[Listener] = set()
        """Called for each line, after it was written."""
        self.is_held = False
        """Whether more lines follow, and the file is closed after them."""
        self._early: list[tuple[Path, int, float, Record]] = []
        """Lines of a start that has read a checkpoint's position and has not begun: they follow its first line."""
        self._is_starting = False

    @property
    def path(self) -> Path | None:
        """The file, also while it is closed; None where there is none."""
        return self._writer.path

    def begin(
        self, directory: Path, step: int, epoch: float, data: Mapping[str, Any]
    ) -> Callable[[], list[Record] | None] | None:
        """Continue the file for a training that begins after `step`, with a line about its start.

        Returns:
            What reads the lines before, or None if the file has lost them by then; None if there are none.

        Raises:
            ConfigError: if the file cannot be written.
        """
        lines = self._writer.open(directory, step)
        position, self._is_starting = self._writer.position, False
        self.append(directory, "start", step, epoch, data)
        self._write_early()
        if lines is None:
            return position.read
        return (lambda: lines) if lines else None

    def append(self, directory: Path | None, kind: Kind, step: int, epoch: float, data: Mapping[str, Any]) -> None:
        """Append a line; it is in the file on return, or waits in memory while the disk refuses it.

        The line's kind and not a metric of that name is its `kind`. A run without a directory keeps no lines.
        """
        if directory is not None:
            if self._is_starting and kind != "decision":
                self._do_not_begin()
            line = {"timestamp": time.time(), "kind": kind, **data} | {"kind": kind}
            self._early.append((directory, step, epoch, line))
            if not self._is_starting:
                self._write_early()
        for hear in self.listeners:
            hear(kind, step, data)

    def close(self) -> None:
        """Make the file durable and close it; a later line reopens it, which reads the whole file."""
        self.is_held = False
        if self._early:
            self._do_not_begin()
            self._write_early()
        self._writer.close()

    def close_unless_held(self) -> None:
        """Close it after an evaluation outside of any training."""
        if not self.is_held:
            self.close()

    def state_dict(self) -> StateDict:
        """The position after the newest line, the lines that the disk might lack, and `num_reported`."""
        return {**self._writer.state_dict(), "num_reported": self.num_reported}

    def make_durable(self) -> None:
        """Fsync the file, before a checkpoint with a position in it is committed."""
        self._writer.make_durable()

    def go_back(self, position: StateDict | None, step: int) -> None:
        """Continue at a checkpoint's position: when training begins, or at once in a rollback.

        Args:
            position: None for a checkpoint from before version 0.5: the lines up to `step` are continued.
        """
        path = self._writer.path
        if position is None and path is not None:
            position = {"log_path": str(path), "last_step": step}
        if position is not None:
            number = position.get("num_reported")
            self.num_reported = number if isinstance(number, int) else 0
            self._is_starting = not self._writer.is_open
            self._writer.load_state_dict(position)

    def _do_not_begin(self) -> None:
        """Forget a position that no training continues from, as for an evaluation of a checkpoint."""
        if self._is_starting:
            self._is_starting, self._writer = False, _new_writer()

    def _write_early(self) -> None:
        while self._early:
            directory, step, epoch, line = self._early.pop(0)
            if not self._writer.is_open:
                self._writer.reopen(directory)
            self.num_reported += is_reported(line)
            self._writer.write_record(step, epoch, line)


def _new_writer() -> JsonLogWriter:
    writer = JsonLogWriter(FILE_NAME)
    writer.level_of_branches = logging.DEBUG  # every resume after a kill has some
    return writer
