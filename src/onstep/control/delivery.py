"""Turns commands into requests to the loop, and what the loop decides about them into their outcomes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from onstep.commands import COMMANDS, Command
from onstep.control.feed import Feed
from onstep.control.inbox import Inbox, Ticket
from onstep.events import Control, Request


@dataclass
class Delivery:
    """The commands of one job on their way. Used by the training thread of rank 0 alone."""

    inbox: Inbox
    feed: Feed
    _awaiting: dict[str, Ticket] = field(default_factory=dict)
    """Requested; the loop has not decided yet."""
    _decided: dict[str, Ticket] = field(default_factory=dict)
    """Decided; their outcome is still to come."""
    is_busy: bool = False
    """Whether the loop must decide something by the end of this step."""

    def deliver(self, control: Control, event: str, step: int) -> list[str]:
        """Request what has been sent since the last time, and report what other callbacks have withdrawn.

        Returns:
            The commands that the loop is to decide about.
        """
        for ticket in self._awaiting.values():
            self._settle(ticket, "refused", step, "another callback withdrew the request")
        self._awaiting = {}
        for ticket in self.inbox.take():
            requests = requests_of(ticket, event)
            if not requests:
                self._settle(ticket, "applied", step)
                continue
            if not self.inbox.is_at_once(ticket.command):  # that has its outcome already, and is only recorded
                self._awaiting[ticket.id] = ticket
            for request in requests:
                control.add_request(request)
        self.is_busy = bool(self._awaiting)
        return [ticket.command for ticket in self._awaiting.values()]

    def note_decision(self, request: Request, step: int) -> None:
        """Note what the loop has decided about a command."""
        identity = request.details.get("command_id")
        if request.flag == "rolled_back":
            self._refuse_undone(identity, step)
        if identity is None or request.details.get("repeated"):
            return
        ticket = self._awaiting.pop(identity, None) or self._decided.get(identity)
        if ticket is None:
            return
        ticket.step = step
        self._decided[ticket.id] = ticket
        if request.flag == "refused":
            self._settle(ticket, "refused", step, str(request.details.get("why", "")))
        elif request.flag == "rolled_back":
            self._settle(ticket, "applied", step, result={"to_step": request.details.get("to_step")})
        elif not _command(ticket).is_done_later:
            self._settle(ticket, "applied", step, result=_result_of(request))

    def _refuse_undone(self, identity: str | None, step: int) -> None:
        """Refuse what was decided at the step that a rollback undid: the loop does not do it any more."""
        why = f"the run was rolled back to step {step} before this was done; send it again"
        undone = [one for one in self._decided.values() if one.id != identity and _command(one).is_undone_by_rollback]
        for ticket in undone:
            self._settle(ticket, "refused", ticket.step, why)

    def finish(self, commands: Iterable[str], result: Any, *, error: str = "") -> None:
        """Settle what was decided of these commands: it is done now."""
        for ticket in [one for one in self._decided.values() if one.command in commands]:
            self._settle(ticket, "refused" if error else "applied", ticket.step, error, result)

    def close(self, why: str) -> None:
        """Refuse what waits, and everything from now on."""
        self.inbox.close(why)
        self._awaiting, self._decided, self.is_busy = {}, {}, False

    def _settle(self, ticket: Ticket, status: Any, step: int | None, message: str = "", result: Any = None) -> None:
        self._decided.pop(ticket.id, None)
        self.inbox.settle(ticket, status, step=step, message=message, result=result)
        self.feed.add_event("command", ticket.to_dict())


def requests_of(ticket: Ticket, event: str) -> list[Request]:
    """What a command asks of the loop."""
    command, data = _command(ticket), ticket.data
    details = {one.detail or one.name: data[one.name] for one in command.parameters}
    if command.is_for_callbacks:
        details = {"command": ticket.command, "data": data}
    return [
        Request(flag, ticket.author, event, "", 0, {"command_id": ticket.id, **details}) for flag in command.requests
    ]


def _command(ticket: Ticket) -> Command:
    return COMMANDS.get(ticket.command) or Command(ticket.command, "", "")


def _result_of(request: Request) -> Any:
    if request.flag == "set":
        return {name: request.details.get(name) for name in ("key", "old", "value")}
    return request.details.get("result")


def describe_commands(own: dict[str, str]) -> list[dict[str, Any]]:
    """All commands that a job accepts, as JSON; `own` are those that callbacks carry out, with their help."""
    more = [Command(name, "", text) for name, text in own.items() if name not in COMMANDS]
    return [one.describe() for one in (*COMMANDS.values(), *more)]
