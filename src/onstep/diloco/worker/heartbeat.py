"""Tells the server now and then that the worker trains and how fast, from a thread of its own."""

from __future__ import annotations

import logging
import threading
import weakref

from onstep.diloco.client.link import Link, LinkClosedError
from onstep.diloco.protocol.messages import Beat
from onstep.diloco.protocol.session import SessionEndedError, WorkerSession
from onstep.diloco.worker.pace import Pace

logger = logging.getLogger(__name__)

IDLE_SECONDS = 600.0
"""Without a step, after which nothing is sent until the next: others should not wait for a worker that hangs."""


class HeartbeatThread:
    """Beats every `interval` seconds until it is stopped; a lost beat is simply followed by the next.

    A training that ends with an error need not stop it: it leaves the run when the worker, and with it `pace`, is gone,
    and is silent when the thread that trained has ended or no step is taken.
    """

    def __init__(
        self, session: WorkerSession, link: Link, interval: float, pace: Pace, idle_seconds: float = IDLE_SECONDS
    ) -> None:
        self.recommended_sync_every: int | None = None
        """What the server recommends for a worker of this speed; None without `dylu`."""
        self.error: SessionEndedError | None = None
        """Why the server no longer accepts this worker."""
        self._session, self._link, self._interval, self._idle_seconds = session, link, interval, idle_seconds
        self._pace = weakref.ref(pace)
        self._trains = threading.current_thread()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="diloco-heartbeat", daemon=True)
        self._thread.start()

    def stop(self, timeout: float = 5.0) -> None:
        """Stop beating; waits for a beat under way, but not longer than `timeout` seconds."""
        self._stopped.set()
        self._thread.join(timeout)

    def _run(self) -> None:
        try:
            while not self._stopped.wait(self._interval):
                pace = self._pace()
                if pace is None:
                    self._link.run(self._session.leave())
                    return
                if pace.seconds_since_step() < self._idle_seconds and self._trains.is_alive():
                    self._beat(pace.steps_per_second())
                del pace
        except LinkClosedError:
            return
        except SessionEndedError as error:
            self.error = error

    def _beat(self, steps_per_second: float) -> None:
        beat = self._link.run(self._session.beat(steps_per_second, self._interval))
        if isinstance(beat, Beat):
            self.recommended_sync_every = beat.recommended_sync_every
        else:
            logger.info("no answer to a heartbeat: %s", beat.reason)
