"""A few bytes of shared memory in which each rank of a run shows, at no cost, where it is; they outlive its death."""

from __future__ import annotations

import mmap
import os
import struct
from enum import IntEnum
from pathlib import Path

from tests.support.waiting import until

VARIABLE = "ONSTEP_KILL_MARKS"
"""Environment variable with the path of the file."""
_RANKS = 8
_RECORD = struct.Struct("<BBI")
"""Phase, whether a save is pending, step."""
_HELD_AT = 7
"""Where in a rank's bytes the phase is at whose beginning it waits; zero for none."""
_SIZE = 8


class Phase(IntEnum):
    """Where a rank is."""

    START_UP = 0
    """Anything before the first step: a zeroed file says so."""
    STEP = 1
    SAVE = 2
    EVALUATION = 3
    END = 4
    """After the training: final evaluation, test, weights, run.json."""


class Marks:
    """The marks of all ranks, for reading and for writing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("ab+") as file:
            file.truncate(_RANKS * _SIZE)  # Zeros, and again the same where another rank is as early.
            self._memory = mmap.mmap(file.fileno(), _RANKS * _SIZE)

    @classmethod
    def of_environment(cls) -> Marks | None:
        """Those that the environment names."""
        path = os.environ.get(VARIABLE)
        return None if path is None else cls(Path(path))

    def clear(self) -> None:
        """Every rank is at its start."""
        self._memory[:] = bytes(len(self._memory))

    def set(self, rank: int, phase: Phase, is_saving: bool, step: int) -> None:
        """Show where a rank is; return once nobody wants to hold it there."""
        _RECORD.pack_into(self._memory, rank * _SIZE, phase, is_saving, step)
        until(lambda: self._memory[rank * _SIZE + _HELD_AT] != self.phase(rank) or self.phase(rank) == Phase.START_UP)

    def hold_at(self, rank: int, phase: Phase | None) -> None:
        """Have a rank wait where that phase begins, so that it is not missed; None lets it go on."""
        self._memory[rank * _SIZE + _HELD_AT] = phase or 0

    def phase(self, rank: int) -> Phase:
        """Where a rank is, or was when it died; a pending save goes before what is done meanwhile."""
        phase, is_saving, _ = _RECORD.unpack_from(self._memory, rank * _SIZE)
        return Phase.SAVE if is_saving else Phase(phase)

    def step(self, rank: int) -> int:
        """How many steps of the run are done; 0 as long as the rank has not begun one."""
        return int(_RECORD.unpack_from(self._memory, rank * _SIZE)[2])
