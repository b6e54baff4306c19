"""Finds out, before anything is built, whether the server of a run answers, and whether a worker's id is free."""

from __future__ import annotations

import logging
import time
from itertools import count
from pathlib import Path

from onstep.diloco.client.connection import Connection
from onstep.diloco.client.membership import lives_here
from onstep.diloco.protocol.operations import ServerLostError
from onstep.diloco.protocol.session import INCUMBENT_PAUSE, may_replace
from onstep.diloco.wire.http import STATUS

logger: logging.Logger = logging.getLogger(__name__)

ANSWER_SECONDS = 10.0
"""Without a byte, after which an attempt has failed."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 2.0


def seconds_of_retries(max_retries: int) -> float:
    """How long a server is waited for that does not answer: 2 + 4 + ... seconds, with this many terms."""
    return float(2 ** (max_retries + 1) - 2)


def check_server(
    address: str,
    *,
    lost_seconds: float,
    worker_id: str | None = None,
    auth_token: str | None = None,
    verify: str | Path | None = None,
) -> None:
    """Wait until a DiLoCo server answers; the first failure is logged at once.

    Args:
        address: `host:port`, or a URL with `http` or `https`.
        lost_seconds: how long to wait for a server that is being started; one attempt may last `ANSWER_SECONDS`.
        worker_id: that this process is going to have; None for a new one.
        auth_token: see `Connection`.
        verify: see `Connection`.

    Raises:
        ServerLostError: if there is no answer for `lost_seconds`.
        RefusedByServerError: for what is not a DiLoCo server, with a wrong token, or for an id whose process lives.
    """
    started = time.monotonic()
    for attempt in count():
        left = lost_seconds - (time.monotonic() - started)
        limit = min(ANSWER_SECONDS, left) if attempt else ANSWER_SECONDS
        server = Connection(address, limit, auth_token, verify)  # a server that starts writes its token first
        try:
            server.check()
            if worker_id is not None:
                _wait_for_id(server, worker_id)
        except ServerLostError as error:
            left = lost_seconds - (time.monotonic() - started)
            pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2**attempt)
            if left <= pause:
                raise ServerLostError(f"no answer from the server: {str(error).rstrip('.')}; is it running?") from error
            if attempt == 0:
                logger.warning("DiLoCo: waiting at most %.0f s for the server: %s", left, error)
        else:
            return
        finally:
            server.close()
        time.sleep(pause)


def _wait_for_id(server: Connection, worker_id: str) -> None:
    """Wait until it is known that no process has a worker's id."""
    started, is_told = time.monotonic(), False
    while True:
        found = server.json("GET", STATUS)
        known, timeout = found.get("workers"), found.get("heartbeat_timeout")
        incumbent = known.get(worker_id) if isinstance(known, dict) else None
        if not isinstance(incumbent, dict) or not isinstance(timeout, int | float):
            return
        asked_for = time.monotonic() - started
        if may_replace(worker_id, incumbent, asked_for, timeout, lives_here(incumbent)):
            return
        if not is_told:
            host = str(incumbent.get("machine"))[:100]
            logger.info("DiLoCo: a process on %s has the id %r; waiting until it is known if it lives", host, worker_id)
            is_told = True
        time.sleep(INCUMBENT_PAUSE)
