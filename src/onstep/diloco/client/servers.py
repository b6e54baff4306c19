"""Sends requests to the server of a run, or to several servers that each have a share of the parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from onstep.diloco.client.connection import Body, Connection
from onstep.diloco.protocol.messages import (
    Await,
    Beat,
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
from onstep.diloco.protocol.session import RefusedByServerError
from onstep.diloco.wire.http import INFO
from onstep.errors import ConfigError

NOTHING = memoryview(b"")
_NOT_THERE = (404, 405, 501)
"""Statuses with which other servers answer a request that they do not know."""


class Servers:
    """The servers of a run, in the order of their shares: to a worker they look like one.

    Fragment `f` of server `s` is the worker's fragment `f * num_servers + s`.

    Args:
        addresses: `host:port`, or a URL with `http` or `https`; several are separated by commas.
        timeout: seconds without a byte after which a server counts as lost.
        token: the bearer token, see `Connection`.
        verify: for `https`, the PEM file of the certification authority.

    Raises:
        ConfigError: for an invalid address.
    """

    def __init__(
        self, addresses: str, timeout: float = 600.0, token: str | None = None, verify: str | Path | None = None
    ) -> None:
        given = [address.strip() for address in addresses.split(",") if address.strip()]
        if not given:
            raise ConfigError("server_addr must be the host:port of a server, got an empty text.")
        self.connections = [Connection(address, timeout, token, verify) for address in given]

    def send(self, request: Request, body: Body = b"") -> tuple[Reply, memoryview]:
        """Send a request once, to the server that it concerns or to all; see `Connection.send`."""
        if isinstance(request, Register) and (refused := self._misplaced()) is not None:
            return refused, NOTHING
        if len(self.connections) == 1:
            return self.connections[0].send(request, body)
        if isinstance(request, Submit | Await):
            return self._send_to_one(request, body)
        replies = []
        for connection in self.connections:
            reply = connection.send(request, body)[0]
            if isinstance(request, Register) and isinstance(reply, Registered) and reply.offer:
                if reply.incumbent and not request.offer:
                    return reply, NOTHING  # the worker decides
                reply = connection.send(replace(request, offer=reply.offer), body)[0]  # each has its own offer
            if isinstance(reply, Refused):
                return reply, NOTHING
            replies.append(reply)
        if isinstance(request, Register):
            return self._joined_registered([reply for reply in replies if isinstance(reply, Registered)]), NOTHING
        if isinstance(request, Heartbeat):
            return _joined_beat([reply for reply in replies if isinstance(reply, Beat)]), NOTHING
        return Left(), NOTHING

    def check(self) -> None:
        """Check that they answer as the servers of a run.

        Raises:
            ServerLostError: if one does not answer.
            RefusedByServerError: if one is not a server of this run, or refuses.
        """
        refused = self._misplaced()
        if refused is not None:
            raise RefusedByServerError(refused.status, refused.error)

    def close(self) -> None:
        """Close the connections."""
        for connection in self.connections:
            connection.close()

    def _misplaced(self) -> Refused | None:
        """The refusal of servers that are not exactly those of a run, in the order of their shares."""
        for number, connection in enumerate(self.connections):
            try:
                info = connection.json("GET", INFO)
            except RefusedByServerError as error:
                if error.status in _NOT_THERE:
                    return _no_server(connection.url)
                return Refused(error.status, f"{error.reason} ({connection.url})")
            settings = info.get("settings")
            if not isinstance(settings, dict):
                return _no_server(connection.url)
            shares = settings.get("num_shares")
            if shares != len(self.connections):
                error_text = (
                    f"the parameters of this run are shared by {shares} servers, and {len(self.connections)} are given"
                )
                return Refused(422, f"{error_text}; give the addresses of all, in the order of their shares.")
            if info.get("share") != number:
                text = f"server {number} of the list, {connection.url}, has share {info.get('share')} of the parameters"
                return Refused(422, f"{text}; give the addresses in the order of their shares, from 0.")
        return None

    def _send_to_one(self, request: Submit | Await, body: Body) -> tuple[Reply, memoryview]:
        fragment, server = divmod(request.fragment, len(self.connections))
        reply, received = self.connections[server].send(replace(request, fragment=fragment), body)
        if isinstance(reply, Ready):
            reply = replace(reply, fragment=request.fragment)
        return reply, received

    def _joined_registered(self, replies: Sequence[Registered]) -> Reply:
        first = replies[0]
        for connection, reply in zip(self.connections, replies, strict=True):
            if reply.settings != first.settings:
                error = f"the settings of {connection.url} are not those of {self.connections[0].url}"
                return Refused(422, f"{error}; start all servers of a run with the same ones.")
        return replace(
            first,
            run_id="+".join(reply.run_id for reply in replies),
            versions=_interleaved([reply.versions for reply in replies]),
            next_sequences=_interleaved([reply.next_sequences for reply in replies]),
        )


def _no_server(url: str) -> Refused:
    return Refused(422, f"{url} does not answer like a DiLoCo server; check its address and port")


def _joined_beat(replies: Sequence[Beat]) -> Beat:
    return Beat(
        versions=_interleaved([reply.versions for reply in replies]),
        num_registered=min(reply.num_registered for reply in replies),
        recommended_sync_every=replies[0].recommended_sync_every,
        command_number=replies[0].command_number,
        commands=replies[0].commands,
    )


def _interleaved(parts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(chain.from_iterable(zip(*parts, strict=True)))
