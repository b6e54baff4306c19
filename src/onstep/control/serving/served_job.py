"""Defines what the server asks of a job, and the job of this process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from onstep.control.commands import check_command
from onstep.control.feed import Feed
from onstep.control.inbox import Inbox, Ticket
from onstep.control.job_info import JobInfo


class ServedJob(Protocol):
    """A job that a server shows and hands commands to."""

    @property
    def job_id(self) -> str:
        """Its id."""

    @property
    def feed(self) -> Feed:
        """What it shows."""

    def describe(self) -> dict[str, Any]:
        """Its endpoint, `alive` and `is_here`, as JSON."""

    async def submit(self, command: str, data: dict[str, Any], author: str) -> Ticket:
        """Hand over a command.

        Raises:
            CommandError: if it is unknown or its data do not fit.
            CommandRefusedError: if the job cannot carry it out now.
        """

    async def ticket(self, ticket_id: str) -> Ticket | None:
        """A command that was handed over, as it is now; None if unknown."""


@dataclass(frozen=True)
class LiveJob:
    """The job of this process."""

    info: JobInfo
    feed: Feed
    inbox: Inbox
    own_commands: Mapping[str, str] = field(default_factory=dict)
    """Commands that the run's callbacks declare, with their help."""

    @property
    def job_id(self) -> str:
        """Its id."""
        return self.info.job_id

    def describe(self) -> dict[str, Any]:
        """Its endpoint, as JSON."""
        return {**self.info.to_dict(), "alive": True, "is_here": True}

    async def submit(self, command: str, data: dict[str, Any], author: str) -> Ticket:
        """Check a command and queue it for the training thread."""
        return self.inbox.submit(command, check_command(command, data, self.own_commands), author)

    async def ticket(self, ticket_id: str) -> Ticket | None:
        """A command of before; it changes while the caller holds it."""
        return self.inbox.get(ticket_id)
