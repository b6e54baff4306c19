"""Simulates lines between sites and the server, on which messages share the bandwidth."""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

from onstep.diloco.simulator.environment.clock import Clock

CONGESTION_CONTROLS = ("cubic", "bbr", "reno")
SEGMENT_BYTES = 1460
"""Payload of a TCP segment on Ethernet."""
_ROUNDING_SECONDS = 1e-6
"""A message that would pass within a microsecond has passed; it must exceed the rounding of the clock."""


def packet_loss_limit(packet_loss: float, round_trip_seconds: float, congestion_control: str = "cubic") -> float:
    """Bytes per second that one TCP connection reaches at a rate of lost packets; infinite without loss, or with BBR.

    BBR sends at the bandwidth that it measures, whatever is lost; that lost packets are sent again is not counted.

    Source: reno: Mathis, Semke, Mahdavi, Ott 1997, "The macroscopic behavior of the TCP congestion avoidance
    algorithm", equation 3 with C = sqrt(3/2). cubic: RFC 9438, section 5.1, and never less than Reno (section 4.3).
    """
    if packet_loss == 0.0 or round_trip_seconds == 0.0 or congestion_control == "bbr":
        return math.inf
    window = math.sqrt(1.5 / packet_loss)
    if congestion_control == "cubic":
        window = max(window, 1.054 * (round_trip_seconds / packet_loss) ** 0.75)
    return SEGMENT_BYTES / round_trip_seconds * window


class Line:
    """One direction of a connection to the network; everything that passes at a time shares it equally.

    Kept in terms of the bytes that each sender has had passed since the line was last idle: a message of `size` bytes
    has passed when that number has increased by `size`, however many others come and go in between.
    """

    def __init__(self, clock: Clock, bytes_per_second: float) -> None:
        self._clock, self._rate = clock, bytes_per_second
        self._passing: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._share = 0.0
        """Bytes that each sender has had passed."""
        self._shared_until = 0.0
        self._wakes_at = math.inf
        self._number = 0

    def carry(self, size: int, done: Callable[..., None], *arguments: Any) -> None:
        """Call `done(*arguments)` when `size` bytes have passed."""
        self._advance()
        self._number += 1
        heappush(self._passing, (self._share + size, self._number, done, arguments))
        self._plan()

    def _advance(self) -> None:
        now = self._clock.now
        if self._passing:
            self._share += (now - self._shared_until) * self._rate / len(self._passing)
        else:
            self._share = 0.0
        self._shared_until = now

    def _plan(self) -> None:
        seconds = (self._passing[0][0] - self._share) * len(self._passing) / self._rate
        if self._clock.now + seconds < self._wakes_at:
            self._wakes_at = self._clock.now + seconds
            self._clock.at(self._wakes_at, self._wake, self._wakes_at)

    def _wake(self, planned: float) -> None:
        """Finish the messages that have passed, and plan the next one."""
        if planned != self._wakes_at:
            return
        self._wakes_at = math.inf
        self._advance()
        passing, rounding = self._passing, self._rate * _ROUNDING_SECONDS
        while passing and (passing[0][0] - self._share) * len(passing) <= rounding:
            _, _, done, arguments = heappop(passing)
            done(*arguments)
        if passing:
            self._plan()


class Path:
    """The lines that a message passes from a worker to the server, or back.

    Each line is shared by itself, and a message has arrived when it has passed all of them and the latency is over: no
    byte is carried twice or for nothing, while a sender that another line slows down leaves its share here to others.
    """

    def __init__(self, clock: Clock, lines: list[Line], latency: float, most_bytes_per_second: float) -> None:
        self._clock, self._lines, self.latency = clock, lines, latency
        self._seconds_per_byte = 1.0 / most_bytes_per_second
        self._num_parts = len(lines) + (self._seconds_per_byte > 0.0)

    def send(self, size: int, arrive: Callable[..., None], *arguments: Any) -> None:
        """Call `arrive(*arguments)` when `size` bytes are there; size 0 for a message without a body."""
        if size == 0 or self._num_parts == 0:
            self._clock.after(self.latency, arrive, *arguments)
        elif self._num_parts == 1 and self._lines:
            self._lines[0].carry(size, self._clock.after, self.latency, arrive, *arguments)
        else:
            passage = _Passage(self._clock, self._num_parts, self.latency, arrive, arguments)
            for line in self._lines:
                line.carry(size, passage.part_is_done)
            if self._seconds_per_byte > 0.0:
                self._clock.after(size * self._seconds_per_byte, passage.part_is_done)


class _Passage:
    """A message under way."""

    __slots__ = ("arguments", "arrive", "clock", "latency", "parts")

    def __init__(
        self, clock: Clock, parts: int, latency: float, arrive: Callable[..., None], arguments: tuple[Any, ...]
    ) -> None:
        self.clock, self.parts, self.latency = clock, parts, latency
        self.arrive, self.arguments = arrive, arguments

    def part_is_done(self) -> None:
        """One of the lines has carried all of it."""
        self.parts -= 1
        if self.parts == 0:
            self.clock.after(self.latency, self.arrive, *self.arguments)
