"""Says which rank failed first, how, and where its output is."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from onstep.launch.outputs import last_line

_CLOSED_BY_LAUNCH = -signal.SIGTERM
_FROM_OUTSIDE = (-signal.SIGKILL, _CLOSED_BY_LAUNCH)
"""Ends of a rank of which it knew nothing: its last line is not the reason."""
_NOTE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable with the file in which a rank tells torchelastic's agent why it ends."""
_UNCAUGHT_REFUSALS = ("onstep.errors.ConfigError: ",)
"""Beginnings of the last line of a script that was refused."""


@dataclass(frozen=True)
class Failure:
    """The end of a rank that failed."""

    rank: int
    code: int
    """Its exit code; the number of a signal as a negative number."""
    error: str
    """The last line that it wrote to standard error; "" if that is not known."""
    output: str
    """Where its output is; "" for the terminal."""
    node: str = ""
    """The host; "" for this one."""
    is_refusal: bool = False
    """Whether the rank has refused its command or its configuration, as it would at each further start."""

    @property
    def exit_code(self) -> int:
        """The exit code as a shell gives it."""
        return self.code if self.code >= 0 else 128 - self.code

    def __str__(self) -> str:
        how = f"exit code {self.code}" if self.code >= 0 else f"killed by {_signal_name(-self.code)}"
        host = f" on {self.node}" if self.node else ""
        said = f" ({self.error})" if self.error else ""
        where = f"; its output is in {self.output}" if self.output else "; its output is above"
        return f"rank {self.rank}{host} failed first: {how}{said}{where}"


def note_refusal(text: str) -> None:
    """Tell the agent that has started this process as a rank, if one has, that its command is refused.

    Args:
        text: what is wrong, which `torchrun` shows in its report.
    """
    _note({"message": text, "timestamp": int(time.time()), "is_refusal": True})


def note_first_failure(rank: int, text: str, *, is_own: bool, is_refusal: bool) -> None:
    """Tell the agent that has started this process as a rank, if one has, which rank has failed first.

    Args:
        rank: the rank.
        text: how it has failed, which `torchrun` shows in its report.
        is_own: whether it is the rank of this process; `torchrun` names the one with the earliest time.
        is_refusal: whether it has refused its configuration.
    """
    later = 0 if is_own else 60
    _note({"message": text, "timestamp": int(time.time()) + later, "first": rank, "is_refusal": is_refusal})


def _note(content: dict[str, Any]) -> None:
    if path := os.environ.get(_NOTE):
        with suppress(OSError):
            Path(path).write_text(json.dumps(content))


def first_failure(
    codes: dict[int, int], outputs: dict[int, str], errors: dict[int, str], notes: dict[int, str]
) -> Failure:
    """The rank that failed first, of those that were seen to have failed at the same time.

    It is the rank that ranks have agreed on, if they have. Otherwise, others fail because it is gone: a signal comes
    before an exit code, and an older last line before a newer one.

    Args:
        codes: the exit codes of failed ranks.
        outputs: the files with standard output of ranks; "" for the terminal.
        errors: the same of standard error.
        notes: the files that `note_refusal` and `note_first_failure` write.
    """
    said = [_content(path) for path in notes.values()]
    agreed_on = next((one for one in said if one.get("first") in errors), None)

    def order(rank: int) -> tuple[bool, bool, float, int]:
        code, path = codes[rank], errors.get(rank, "")
        written = os.path.getmtime(path) if path and os.path.exists(path) else 0.0
        return code == _CLOSED_BY_LAUNCH, code >= 0, written, rank

    first = min(codes, key=order)
    rank = first if agreed_on is None else agreed_on["first"]
    code = codes.get(rank, codes[first])
    error = "" if code in _FROM_OUTSIDE else last_line(errors.get(rank, ""))
    note = agreed_on or _content(notes.get(rank, ""))
    is_refusal = error.startswith(_UNCAUGHT_REFUSALS) or bool(note.get("is_refusal"))
    if agreed_on is not None and code not in _FROM_OUTSIDE:
        error = str(agreed_on["message"])
    return Failure(rank, code, error, (errors if error else outputs).get(rank, ""), is_refusal=is_refusal)


def _content(path: str) -> dict[str, Any]:
    """What a rank has noted; others than Onstep's may be torch's own."""
    try:
        found = json.loads(Path(path).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def agreed(own: Failure, store: Any, host: str) -> Failure:
    """The failure that was the first on any node of this attempt.

    Args:
        own: the first failure on this node.
        store: a store of this attempt that all nodes see.
        host: the name of this node.
    """
    mine = json.dumps({**asdict(own), "node": host})
    found = Failure(**json.loads(store.compare_set("onstep/first-failure", "", mine)))
    return own if found.rank == own.rank else found


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
