"""Hands commands from the threads of a server to the training thread, and their outcomes back."""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from onstep.control.commands import CommandRefusedError
from onstep.errors import text_of

Status = Literal["queued", "applied", "refused"]
Check = Callable[[str, dict[str, Any]], None]

_KEPT = 1000
"""Tickets that are still known after they are settled."""


@dataclass(eq=False)
class Ticket:
    """A command on its way, and its outcome. Compared by identity."""

    command: str
    data: dict[str, Any]
    author: str
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    received_at: float = field(default_factory=time.time)
    """Unix time in seconds."""
    status: Status = "queued"
    step: int | None = None
    """The step after which it was applied; the same on all ranks."""
    applied_at: float | None = None
    message: str = ""
    """Why it was refused, or a remark."""
    result: Any = None
    """What the command gave, as JSON: generated texts, stacks, the directory of a checkpoint or trace."""

    def to_dict(self) -> dict[str, Any]:
        """All fields, as JSON."""
        return asdict(self)


class Inbox:
    """The commands that wait for the training thread.

    `submit`, `get` and `close` may be called from any thread, `take` and `settle` by the training thread. The training
    thread reads `has_new` at every step, without a lock.

    Args:
        check: refuses a command that the job cannot carry out now, by raising `CommandRefusedError`; called in the
            thread that submits.
        at_once: commands that do not wait for the training thread, and what carries each out, in a thread of its own.
        most_waiting: more commands than this are refused until some are applied.
    """

    def __init__(
        self,
        check: Check | None = None,
        most_waiting: int = 100,
        at_once: Mapping[str, Callable[[], Any]] | None = None,
    ) -> None:
        self.has_new = False
        """Whether a command waits."""
        self._check = check
        self._at_once = dict(at_once or {})
        self._most_waiting = most_waiting
        self._lock = threading.Lock()
        self._waiting: deque[Ticket] = deque()
        self._known: OrderedDict[str, Ticket] = OrderedDict()
        self._closed_because: str | None = None

    def submit(self, command: str, data: dict[str, Any], author: str) -> Ticket:
        """Queue a command whose data `check_command` has accepted.

        Raises:
            CommandRefusedError: if training has ended, too many commands wait, or `check` refuses it.
        """
        if self._check is not None and self._closed_because is None:
            self._check(command, data)
        ticket = Ticket(command, data, author)
        with self._lock:
            if self._closed_because is not None:
                raise CommandRefusedError(f"{command}: {self._closed_because}")
            if len(self._waiting) >= self._most_waiting:
                raise CommandRefusedError(
                    f"{command}: {self._most_waiting} commands already wait for the end of a step; try again later."
                )
            self._waiting.append(ticket)
            self._remember(ticket)
            self.has_new = True
        if command in self._at_once:
            threading.Thread(target=self._carry_out, args=(ticket,), name="onstep-command", daemon=True).start()
        return ticket

    @property
    def num_waiting(self) -> int:
        """How many commands wait."""
        return len(self._waiting)

    def awaits(self, command: str) -> bool:
        """Whether a command of this name has no outcome yet."""
        with self._lock:
            return any(one.command == command and one.status == "queued" for one in self._known.values())

    def is_at_once(self, command: str) -> bool:
        """Whether a command does not wait for the training thread."""
        return command in self._at_once

    def take(self) -> list[Ticket]:
        """Remove and return the waiting commands, in order of arrival."""
        with self._lock:
            tickets = list(self._waiting)
            self._waiting.clear()
            self.has_new = False
        return tickets

    def settle(
        self, ticket: Ticket, status: Status, *, step: int | None = None, message: str = "", result: Any = None
    ) -> None:
        """Record the outcome of a command; a later outcome of the same command is ignored."""
        if ticket.status != "queued":
            return
        ticket.step, ticket.message, ticket.result, ticket.applied_at = step, message, result, time.time()
        ticket.status = status  # last: a reader in another thread then sees the rest
        with self._lock:
            self._remember(ticket)

    def get(self, ticket_id: str) -> Ticket | None:
        """The command with this id; None if unknown, or settled so long ago that it is forgotten."""
        with self._lock:
            return self._known.get(ticket_id)

    def close(self, why: str) -> None:
        """Refuse the waiting commands and all later ones."""
        with self._lock:
            self._closed_because = self._closed_because or why
            tickets = [one for one in self._known.values() if one.status == "queued"]
            self._waiting.clear()
            self.has_new = False
        for ticket in tickets:
            self.settle(ticket, "refused", message=why)

    def _carry_out(self, ticket: Ticket) -> None:
        try:
            self.settle(ticket, "applied", result=self._at_once[ticket.command]())
        except Exception as error:  # noqa: BLE001 - the caller gets an answer, whatever goes wrong in this thread
            self.settle(ticket, "refused", message=f"{type(error).__name__}: {text_of(error)}")

    def _remember(self, ticket: Ticket) -> None:
        self._known[ticket.id] = ticket
        while len(self._known) > _KEPT + self._most_waiting:
            self._known.popitem(last=False)
