"""Sends heartbeats with the worker's speed from a thread of its own."""

from __future__ import annotations

import logging
import threading
import weakref

from onstep.diloco.client.membership import Membership, MembershipClosedError
from onstep.diloco.protocol.operations import RefusedByServerError, ServerLostError
from onstep.diloco.worker.pace import Pace

logger = logging.getLogger(__name__)

IDLE_SECONDS = 600.0
"""Without a step, after which no heartbeat is sent until the next: others should not wait for a worker that hangs."""

_BEATS_WITHIN_TIMEOUT = 3
_LONGEST_PAUSE = 1.0
"""Seconds between two looks at when the next heartbeat is due."""


class HeartbeatThread:
    """Sends a heartbeat every `interval` seconds, or earlier for a server that evicts earlier, until it is stopped.

    A training that fails need not stop it: it leaves the run when the worker, and with it `pace`, is garbage-collected,
    and is silent when the training thread has ended or no step was taken for `idle_seconds`.
    """

    def __init__(self, member: Membership, interval: float, pace: Pace, idle_seconds: float = IDLE_SECONDS) -> None:
        self.recommended_sync_every: int | None = None
        """The server's recommendation for a worker of this speed; None without `dylu`."""
        self.error: RefusedByServerError | None = None
        """The server's refusal, once a heartbeat was refused."""
        self._member, self._interval, self._idle_seconds = member, interval, idle_seconds
        self._pace = weakref.ref(pace)
        self._training_thread = threading.current_thread()
        self._named: float | None = None
        """The interval that was named, because it is shorter than the one asked for."""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="diloco-heartbeat", daemon=True)
        self._thread.start()

    def stop(self, timeout: float = 5.0) -> None:
        """Stop; waits at most `timeout` seconds for the heartbeat that is being sent."""
        self._stopped.set()
        self._thread.join(timeout)

    def _run(self) -> None:
        try:
            has_news = False
            while has_news or not self._wait():
                pace = self._pace()
                if pace is None:
                    self._member.leave()
                    return
                has_news = False
                if pace.seconds_since_step() < self._idle_seconds and self._training_thread.is_alive():
                    has_news = self._beat(pace.steps_per_second())
                del pace
        except MembershipClosedError:
            return
        except RefusedByServerError as error:
            self.error = error

    def _wait(self) -> bool:
        """Wait until the next heartbeat is due; True if this thread is to stop.

        A server that evicts earlier after a restart says so when the worker registers again, in another thread.
        """
        waited = 0.0
        while (left := self._due_after() - waited) > 0:
            pause = min(_LONGEST_PAUSE, left)
            if self._stopped.wait(pause):
                return True
            waited += pause
        return self._stopped.is_set()

    def _due_after(self) -> float:
        """Seconds between two heartbeats, at most a third of the silence after which the server evicts a worker."""
        registered = self._member.session.registered
        timeout = 0.0 if registered is None else registered.settings.heartbeat_timeout
        longest = timeout / _BEATS_WITHIN_TIMEOUT if timeout else self._interval
        if longest < self._interval and longest != self._named:
            logger.info(
                "DiLoCo: heartbeats every %g s, as the server evicts a worker after %g s of silence", longest, timeout
            )
            self._named = longest
        return min(self._interval, longest)

    def _beat(self, steps_per_second: float) -> bool:
        """Send one; whether it brought commands, whose receipt the server learns by another."""
        try:
            beat = self._member.beat(steps_per_second, self._interval)
        except ServerLostError as error:
            self._member.outage.begin(str(error))
            return False
        self.recommended_sync_every = beat.recommended_sync_every
        return bool(beat.commands)
