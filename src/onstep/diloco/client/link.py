"""Runs operations of the protocol over a client, in the calling thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from onstep.diloco.client.connection import ServerLostError
from onstep.diloco.protocol.messages import ParameterSpec, Register, Reply, Request, Submit
from onstep.diloco.protocol.session import Answer, Lost, Operation, Send, Sleep, Unsettled
from onstep.diloco.wire.http import specs_to_bytes
from onstep.errors import OnstepError

T = TypeVar("T")


class Client(Protocol):
    """What a link requires of a client."""

    def send(self, request: Request, body: bytes = b"") -> tuple[Reply, Any]:
        """The reply and its body; raises ServerLostError without one."""

    def close(self) -> None:
        """Close the connections."""


class LinkClosedError(OnstepError):
    """The worker stopped while an operation was under way."""


@dataclass
class Transfers:
    """What went over the link so far; seconds are those of requests with a body, which measure the bandwidth."""

    sent_bytes: int = 0
    received_bytes: int = 0
    last_received_bytes: int = 0
    """Of the last version."""
    upload_bytes_per_second: float = 0.0
    """Of the last submission; 0 before one."""
    download_bytes_per_second: float = 0.0


class Link:
    """Performs what an operation asks for: requests by the client, pauses by waiting.

    Args:
        client: sends one request and returns its reply.
        specs: goes with registrations, so that a server can name the first parameter that differs.
        lost_seconds: an operation that gets no answer for so long ends as Unsettled, whatever its bound.
    """

    def __init__(self, client: Client, specs: Sequence[ParameterSpec], lost_seconds: float) -> None:
        self._client = client
        self._specs = specs_to_bytes(specs)
        self._lost_seconds = lost_seconds
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self.transfers = Transfers()

    def close(self) -> None:
        """End all operations: those under way raise LinkClosedError as soon as their request returns."""
        self._closed.set()

    def run(self, operation: Operation[T]) -> T | Unsettled:
        """The operation's result. Several threads may run one each: they change the session in turn."""
        outcome: Answer | Lost | None = None
        answered_at = time.monotonic()
        while not self._closed.is_set():
            try:
                with self._lock:
                    effect = operation.send(outcome)
            except StopIteration as done:
                result: T = done.value
                return result
            outcome = self._perform(effect) if isinstance(effect, Send) else self._sleep(effect, outcome)
            if isinstance(outcome, Answer):
                answered_at = time.monotonic()
            elif isinstance(outcome, Lost) and time.monotonic() - answered_at > self._lost_seconds:
                operation.close()
                return Unsettled(outcome.reason)
        operation.close()
        raise LinkClosedError("the worker was stopped")

    def _sleep(self, effect: Sleep, outcome: Answer | Lost | None) -> Answer | Lost | None:
        self._closed.wait(effect.seconds)
        return outcome if isinstance(outcome, Lost) else None

    def _perform(self, effect: Send) -> Answer | Lost:
        body = self._specs if isinstance(effect.request, Register) else effect.body
        sent = body if isinstance(body, bytes) else b""
        start = time.monotonic()
        try:
            reply, received = self._client.send(effect.request, sent)
        except ServerLostError as error:
            return Lost(str(error))
        self._measure(effect.request, len(sent), len(received or b""), max(time.monotonic() - start, 1e-9))
        return Answer(reply, received)

    def _measure(self, request: Request, sent: int, received: int, seconds: float) -> None:
        with self._lock:
            transfers = self.transfers
            transfers.sent_bytes += sent
            transfers.received_bytes += received
            if isinstance(request, Submit):
                transfers.upload_bytes_per_second = sent / seconds
            elif received:
                transfers.last_received_bytes = received
                transfers.download_bytes_per_second = received / seconds
