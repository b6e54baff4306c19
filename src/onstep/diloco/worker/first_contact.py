"""Finds out, before anything is built, whether the servers of a run answer."""

from __future__ import annotations

import logging
import time
from itertools import count
from pathlib import Path

from onstep.diloco.client.servers import Servers
from onstep.diloco.protocol.session import ServerLostError

logger: logging.Logger = logging.getLogger(__name__)

ANSWER_SECONDS = 10.0
"""Without a byte, after which an attempt has failed."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 2.0


def seconds_of_retries(max_retries: int) -> float:
    """How long a server is waited for that does not answer: 2 + 4 + ... seconds, with this many terms."""
    return float(2 ** (max_retries + 1) - 2)


def check_servers(
    addresses: str, *, lost_seconds: float, auth_token: str | None = None, verify: str | Path | None = None
) -> None:
    """Wait until all servers answer; the first failure is logged at once.

    Args:
        addresses: `host:port`, several separated by commas.
        lost_seconds: how long to wait for a server that is being started.
        auth_token: see `Servers`.
        verify: see `Servers`.

    Raises:
        ServerLostError: if there is no answer for `lost_seconds`.
        RefusedByServerError: for what is not a server of a run, another order of the servers, or a wrong token.
    """
    started = time.monotonic()
    for attempt in count():
        servers = Servers(addresses, ANSWER_SECONDS, auth_token, verify)  # a server that starts writes its token first
        try:
            servers.check()
        except ServerLostError as error:
            if time.monotonic() - started >= lost_seconds:
                raise ServerLostError(f"no answer from the server: {error}; is it running?") from error
            if attempt == 0:
                logger.warning("DiLoCo: waiting at most %g s for the server: %s", lost_seconds, error)
        else:
            return
        finally:
            servers.close()
        time.sleep(min(_LONGEST_PAUSE, _FIRST_PAUSE * 2**attempt))
