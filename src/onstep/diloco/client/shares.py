"""Makes several servers, each with a share of the parameters, look like one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain

from onstep.diloco.client.connection import Body, Connection, RefusedByServerError
from onstep.diloco.protocol.messages import (
    Await,
    Beat,
    Deregister,
    Heartbeat,
    Left,
    Ready,
    Refused,
    Register,
    Registered,
    Reply,
    Request,
    Submit,
)
from onstep.diloco.wire.http import INFO

NOTHING = memoryview(b"")


class Shares:
    """The servers of a run, in the order of their shares.

    Fragment `f` of server `s` is fragment `f * num_servers + s` here.
    """

    def __init__(self, connections: Sequence[Connection]) -> None:
        self.connections = tuple(connections)

    def send(self, request: Request, body: Body = b"", timeout: float | None = None) -> tuple[Reply, memoryview]:
        """Send a request of the protocol to the server that it concerns, or to all; see `Connection.send`."""
        if isinstance(request, Register) and (refused := self._misplaced(timeout)) is not None:
            return refused, NOTHING
        if len(self.connections) == 1:
            return self.connections[0].send(request, body, timeout)
        if isinstance(request, Submit | Await):
            return self._to_one(request, body, timeout)
        replies = []
        for connection in self.connections:
            reply = connection.send(request, body, timeout)[0]
            if isinstance(request, Register) and isinstance(reply, Registered) and reply.offer:
                reply = connection.send(replace(request, offer=reply.offer), body, timeout)[0]  # each has its own offer
            if isinstance(reply, Refused):
                return reply, NOTHING
            replies.append(reply)
        return self._joined(request, replies), NOTHING

    def _misplaced(self, timeout: float | None) -> Refused | None:
        """The refusal of servers that are not all those of a run, in the order of their shares."""
        for number, connection in enumerate(self.connections):
            try:
                info = connection.json("GET", INFO, timeout=timeout)
            except RefusedByServerError as error:
                return Refused(error.status, str(error))
            settings = info.get("settings")
            shares = settings.get("num_shares") if isinstance(settings, dict) else None
            if shares != len(self.connections):
                return _wrong_number(len(self.connections), shares)
            if info.get("share") != number:
                text = f"server {number} of the list, {connection.url}, has share {info.get('share')} of the parameters"
                return Refused(422, f"{text}; give the addresses in the order of their shares, from 0.")
        return None

    def _to_one(self, request: Submit | Await, body: Body, timeout: float | None) -> tuple[Reply, memoryview]:
        fragment, server = divmod(request.fragment, len(self.connections))
        reply, received = self.connections[server].send(replace(request, fragment=fragment), body, timeout)
        if isinstance(reply, Ready):
            reply = replace(reply, fragment=request.fragment)
        return reply, received

    def _joined(self, request: Request, replies: Sequence[Reply]) -> Reply:
        joins: dict[type, Callable[[Sequence[Reply]], Reply]] = {
            Register: self._registered,
            Heartbeat: _beat,
            Deregister: lambda replies: Left(),
        }
        return joins[type(request)](replies)

    def _registered(self, replies: Sequence[Reply]) -> Reply:
        members = [reply for reply in replies if isinstance(reply, Registered)]
        first = members[0]
        for number, one in enumerate(members):
            if one.settings != first.settings:
                error = f"the settings of {self.connections[number].url} are not those of {self.connections[0].url}"
                return Refused(422, f"{error}; start all servers of a run with the same ones.")
        return replace(
            first,
            run_id="+".join(one.run_id for one in members),
            versions=_interleaved([one.versions for one in members]),
            next_sequences=_interleaved([one.next_sequences for one in members]),
        )


def _wrong_number(given: int, expected: object) -> Refused:
    error = f"the parameters of this run are shared by {expected} servers, and {given} are given"
    return Refused(422, f"{error}; give the addresses of all, in the order of their shares.")


def _beat(replies: Sequence[Reply]) -> Reply:
    beats = [reply for reply in replies if isinstance(reply, Beat)]
    return Beat(
        versions=_interleaved([one.versions for one in beats]),
        num_registered=min(one.num_registered for one in beats),
        recommended_sync_every=beats[0].recommended_sync_every,
    )


def _interleaved(parts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(chain.from_iterable(zip(*parts, strict=True)))
