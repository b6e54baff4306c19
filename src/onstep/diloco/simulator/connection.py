"""Simulates a worker's connection to the server, on which requests and replies may be lost."""

from __future__ import annotations

from random import Random

from onstep.diloco.protocol.messages import Reply, Request, Submit
from onstep.diloco.protocol.operations import Answer, Lost, Send
from onstep.diloco.simulator.environment.clock import Clock
from onstep.diloco.simulator.environment.network import Path
from onstep.diloco.simulator.environment.tasks import Task
from onstep.diloco.simulator.measures import SiteCounts
from onstep.diloco.simulator.payload import Payload
from onstep.diloco.simulator.server import SimulatedServer

CONNECT_SECONDS = 10.0
"""After which a request to an unreachable server fails."""


class Connection:
    """Sends the requests of one worker, whose site may be cut off for some time."""

    def __init__(
        self,
        clock: Clock,
        server: SimulatedServer,
        up: Path,
        down: Path,
        payload: Payload,
        counts: SiteCounts,
        random: Random,
        request_loss: float,
    ) -> None:
        self.clock, self.server, self.up, self.down = clock, server, up, down
        self.payload, self.counts = payload, counts
        self.is_cut = False
        self.delivered: dict[int, int] = {}
        """Sequence number of the last submission that reached the server, by fragment."""
        self._random, self._request_loss = random, request_loss

    def send(self, request: Send, task: Task) -> None:
        """Send a request; the task continues with the answer, or with Lost."""
        exchange = _Exchange(self, request.request, task)
        if self.is_cut:
            exchange.give_up("the server cannot be reached", CONNECT_SECONDS)
            return
        if self._request_loss and self._random.random() < self._request_loss:
            exchange.loses_request = self._random.random() < 0.5
            exchange.loses_reply = not exchange.loses_request
        size = request.body if type(request.body) is int else 0
        self.counts.bytes_up += size
        self.up.send(size, exchange.arrive)


class _Exchange:
    """A request and its reply."""

    __slots__ = ("_connection", "_request", "_task", "loses_reply", "loses_request")

    def __init__(self, connection: Connection, request: Request, task: Task) -> None:
        self._connection, self._request, self._task = connection, request, task
        self.loses_request = self.loses_reply = False

    def arrive(self) -> None:
        """The request arrives at the server."""
        connection = self._connection
        if self._task.is_over:  # the worker was killed while it sent
            return
        if connection.is_cut:
            self.give_up("the connection was cut", CONNECT_SECONDS)
        elif self.loses_request:
            self.give_up("the request was lost", connection.down.latency)
        else:
            request = self._request
            if type(request) is Submit and connection.server.is_up:
                connection.delivered[request.fragment] = request.sequence
            connection.server.receive(request, self)

    def answer(self, reply: Reply) -> None:
        """The server replies."""
        connection = self._connection
        if self._task.is_over:  # the worker was killed
            return
        if connection.is_cut:
            self.give_up("the connection was cut", CONNECT_SECONDS)
            return
        size = connection.payload.of_reply(reply)
        connection.counts.bytes_down += size
        connection.down.send(size, self._deliver, Answer(reply, size))

    def fail(self, reason: str) -> None:
        """The server is down, or dies before it replies."""
        self.give_up(reason, self._connection.down.latency)

    def give_up(self, reason: str, seconds: float) -> None:
        """The worker gets a Lost after some seconds."""
        self._connection.counts.lost_requests += 1
        self._connection.clock.after(seconds, self._task.resume, Lost(reason))

    def _deliver(self, answer: Answer) -> None:
        if self.loses_reply or self._connection.is_cut:
            self.give_up("the reply was lost", 0.0)
        else:
            self._task.resume(answer)
