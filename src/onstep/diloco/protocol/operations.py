"""Operations of a worker: generators that yield effects and get outcomes, so that they need no sockets or threads.

A driver performs the effects that an operation yields and sends the outcome back: `Answer` or `Lost` for `Send`,
anything for `Sleep`. Every operation has a bound in seconds, kept by an injected clock; the driver's own timeout for
one request should be well below it.

    operation, outcome = session.result(fragment, bound=60.0), None
    try:
        while True:
            outcome = perform(operation.send(outcome))
    except StopIteration as done:
        return done.value
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeVar

from onstep.diloco.protocol.messages import Ready, Reply, Request
from onstep.errors import ConfigError, OnstepError


class ServerLostError(OnstepError, ConnectionError):
    """No result came from a server in time; it may have received the request or not."""


class RoundOpenError(ServerLostError):
    """The server answers, and the round was not committed in time."""


class RefusedByServerError(ConfigError, ConnectionError):
    """A server answered and refused; repeating the same request does not help. `status` is that of HTTP."""

    def __init__(self, status: int, reason: str, server: str = "the server") -> None:
        super().__init__(f"HTTP {status} from {server}: {reason}")
        self.status, self.reason = status, reason


@dataclass(frozen=True, slots=True)
class Send:
    """Send a request; `body` is passed through to the driver."""

    request: Request
    body: object = None


@dataclass(frozen=True, slots=True)
class Sleep:
    """Wait."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Answer:
    """The server's reply; `body` is the driver's."""

    reply: Reply
    body: object = None


@dataclass(frozen=True, slots=True)
class Lost:
    """No answer came; whether the server has received the request is unknown."""

    reason: str


@dataclass(frozen=True, slots=True)
class Delivery:
    """A version of a fragment as the server sent it; `body` is the driver's."""

    ready: Ready
    body: object = None


Effect = Send | Sleep
Outcome = Answer | Lost | None
T = TypeVar("T")
Operation = Generator[Effect, Outcome, T]
