"""Writes what a run decides to its `decisions.jsonl`, each line with a digest of the file up to it."""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from blake3 import blake3

from onstep.commands import REQUESTS
from onstep.errors import DataError
from onstep.events import Request
from onstep.events.control import STICKY
from onstep.events.settings import SETTABLE
from onstep.files.bounded_reading import read_bytes
from onstep.files.json_values import encode
from onstep.record.digests import hash_of

LEARNED = tuple(flag for flag, kind in REQUESTS.items() if kind.changes_learning)
"""Requests from outside that change what is learned."""
REPEATED = (*LEARNED, *STICKY)
"""Requests from outside that a run repeats which was interrupted after them."""
WITHDRAWN = "withdrawn"
"""The decision of a start with `run.without_commands_from`: which commands are not repeated any more."""
CHANGED = "changed"
"""The decision of a start with other settings than those of its checkpoint: which commands they replace."""
FAILED_AFTER = "failed_after"
"""The decision of a run that ended with an error: the command that may be the cause."""
BATCHES_TO_SKIP = "batches_to_skip"
"""Key of `TrainState.overrides`: how many of the next steps only read their batches."""
BRANCH = "branch"
"""Of each decision: the number of rollbacks that the run had done when it was made."""
POSITION = "position"
"""Of the decision `saved`: the size in bytes of `decisions.jsonl` when the state of the checkpoint was captured."""
_DIGEST = b', "digest": "'
"""In each line, before BLAKE3 of the file up to here, by which a start recognizes lines that changed or are lost."""
_DIGITS = 32
_MOST_BYTES = 1 << 28
_HARMLESS = SETTABLE.keys() - {"lr_factor"}


class Sent(NamedTuple):
    """A request from outside, or a rollback that a callback requested: what was sent later follows it."""

    step: int
    """The step after which it was applied."""
    request: Request
    branch: int = 0
    """The number of rollbacks before it."""


@dataclass
class DecisionLog:
    """The writer of a run's `decisions.jsonl`, and what is still to be repeated of it."""

    repeats: deque[Sent] = field(default_factory=deque)
    """Decisions to repeat, each after its step: those made between the checkpoint and an interruption."""
    branch: int = 0
    """The number of rollbacks that the run has done."""
    _hash: blake3 = field(default_factory=blake3)
    """Of the file, while it has `_num_bytes`."""
    _num_bytes: int = 0

    def append(self, path: Path, entry: dict[str, Any]) -> None:
        """Append a decision, with a digest of the file up to here.

        Raises:
            OSError: if it cannot be written.
        """
        with path.open("ab+", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            is_torn = size > 0 and file.read(1) != b"\n"  # by an earlier crash
            if size != self._num_bytes:
                self._hash = hash_of(file.fileno(), size)
            text = b"\n" * is_torn + encode(entry).encode().removesuffix(b"}")
            self._hash.update(text)
            end = _DIGEST + self._hash.hexdigest()[:_DIGITS].encode() + b'"}\n'
            self._hash.update(end)
            self._num_bytes = -1  # unknown if the disk is full
            file.write(text + end)
            self._num_bytes = size + len(text) + len(end)

    def captured_now(self, path: Path) -> dict[str, int]:
        """For the manifest and the line `saved` of a checkpoint: which decisions the current state contains."""
        return {BRANCH: self.branch, POSITION: path.stat().st_size if path.exists() else 0}


def first_change(path: Path) -> int | None:
    """The number of the first line that is not as it was written, or that follows a lost or doubled one; None if none.

    Lines without a digest are those of earlier versions, or torn by a crash.

    Raises:
        DataError: if the file cannot be read.
    """
    hasher, has_digests, lines = blake3(), False, content_of(path).splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        text, mark, end = line.rpartition(_DIGEST)
        if mark and len(end) == _DIGITS + len('"}\n'):
            hasher.update(text)
            if not end.startswith(hasher.hexdigest()[:_DIGITS].encode()):
                return number
            hasher.update(mark + end)
            has_digests = True
        else:
            hasher.update(line)
            if has_digests and number == len(lines) and line.endswith(b"\n"):
                return number
    return None


def changes_learning(request: Request) -> bool:
    """Whether what is learned depends on a request from outside."""
    return request.flag in LEARNED and not (request.flag == "set" and request.details.get("key") in _HARMLESS)


def sets_length(request: Request) -> bool:
    """Whether a request sets the number of steps of the run."""
    return request.flag == "set" and request.details.get("key") == "train_iters"


def content_of(path: Path) -> bytes:
    """The bytes of a run's `decisions.jsonl`; none without one.

    Raises:
        DataError: if it cannot be read.
    """
    try:
        return read_bytes(path, _MOST_BYTES, error=DataError)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror}), so it is not known what the run was asked for after its "
            f"checkpoint; restore the file, or move what is there away to continue without."
        ) from None
