"""Tells the server now and then that the worker is alive and how fast, from a thread of its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from onstep.diloco.protocol.messages import Beat
from onstep.diloco.protocol.session import SessionEndedError, WorkerSession
from onstep.diloco.worker.link import Link, LinkClosedError

logger = logging.getLogger(__name__)


class HeartbeatThread:
    """Beats every `interval` seconds until it is stopped; a lost beat is simply followed by the next."""

    def __init__(
        self, session: WorkerSession, link: Link, interval: float, steps_per_second: Callable[[], float]
    ) -> None:
        self.recommended_sync_every: int | None = None
        """What the server recommends for a worker of this speed; None without `dylu`."""
        self.error: SessionEndedError | None = None
        """Why the server no longer accepts this worker."""
        self._session, self._link, self._interval, self._pace = session, link, interval, steps_per_second
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="diloco-heartbeat", daemon=True)
        self._thread.start()

    def stop(self, timeout: float = 5.0) -> None:
        """Stop beating; waits for a beat under way, but not longer than `timeout` seconds."""
        self._stopped.set()
        self._thread.join(timeout)

    def _run(self) -> None:
        while not self._stopped.wait(self._interval):
            try:
                beat = self._link.run(self._session.beat(self._pace(), self._interval))
            except LinkClosedError:
                return
            except SessionEndedError as error:
                self.error = error
                return
            if isinstance(beat, Beat):
                self.recommended_sync_every = beat.recommended_sync_every
            else:
                logger.info("no answer to a heartbeat: %s", beat.reason)
