"""Runs operations of workers, written as generators, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Protocol

from onstep.diloco.protocol.operations import Outcome, Send, Sleep
from onstep.diloco.simulator.environment.clock import Clock


class Transport(Protocol):
    """Carries a worker's requests."""

    def send(self, request: Send, task: Task) -> None:
        """Call `task.resume` with the outcome once there is one."""
        ...


class Task:
    """A running generator; another task that yields it waits for its end."""

    __slots__ = ("_clock", "_generator", "_then", "_transport", "is_over", "result")

    def __init__(self, clock: Clock, transport: Transport, generator: Generator[Any, Any, Any]) -> None:
        self._clock, self._transport, self._generator = clock, transport, generator
        self._then: Callable[[Any], None] | None = None
        self.is_over = False
        self.result: Any = None

    def resume(self, outcome: Outcome) -> None:
        """Continue with the outcome of the effect that the generator yielded; no-op if the task was cancelled."""
        if self.is_over:
            return
        try:
            effect = self._generator.send(outcome)
        except StopIteration as end:
            self._finish(end.value)
            return
        kind = type(effect)
        if kind is Send:
            self._transport.send(effect, self)
        elif kind is Sleep:
            self._clock.after(effect.seconds, self.resume, None)
        else:
            effect._wait(self.resume)

    def cancel(self) -> None:
        """Stop: later outcomes are ignored."""
        self.is_over = True
        self._generator.close()

    def _wait(self, then: Callable[[Any], None]) -> None:
        if self.is_over:
            self._clock.after(0.0, then, None)
        else:
            self._then = then

    def _finish(self, result: Any) -> None:
        self.is_over, self.result = True, result
        if self._then is not None:
            self._then(None)
