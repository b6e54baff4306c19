"""Sends heartbeats with the worker's speed from a thread of its own."""

from __future__ import annotations

import logging
import threading
import weakref

from onstep.diloco.client.membership import Membership, MembershipClosedError
from onstep.diloco.protocol.session import RefusedByServerError, ServerLostError
from onstep.diloco.worker.pace import Pace

logger = logging.getLogger(__name__)

IDLE_SECONDS = 600.0
"""Without a step, after which no heartbeat is sent until the next: others should not wait for a worker that hangs."""


class HeartbeatThread:
    """Sends a heartbeat every `interval` seconds until it is stopped.

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
            while not self._stopped.wait(0.0 if has_news else self._interval):
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

    def _beat(self, steps_per_second: float) -> bool:
        """Send one; whether it brought commands, whose receipt the server learns by another."""
        try:
            beat = self._member.beat(steps_per_second, self._interval)
        except ServerLostError as error:
            logger.info("no answer to a heartbeat: %s", error)
            return False
        self.recommended_sync_every = beat.recommended_sync_every
        return bool(beat.commands)
