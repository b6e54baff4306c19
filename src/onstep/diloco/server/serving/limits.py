"""Makes room for the connections of all workers."""

from __future__ import annotations

import resource

from onstep.diloco.wire.http import MOST_HEADER_BYTES
from onstep.http.listener import ClientLimits

MOST_CONNECTIONS, CONNECTIONS_OF_A_WORKER = 4096, 3
"""One for heartbeats, and one for each submission that is under way."""
ACCEPTS_PER_SECOND = 500.0
SPARE_DESCRIPTORS = 128
"""For files, and for what else the program does."""
STALL_SECONDS = 60.0
"""A reader of an answer may pause for that long; then it is cut off."""
BACKLOG = 1024


def client_limits(num_workers: int) -> ClientLimits:
    """Limits for a server of so many workers; the soft limit of open files, often 1024, is raised if it is too low."""
    needed = num_workers * CONNECTIONS_OF_A_WORKER + SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return ClientLimits(
        connections=min(MOST_CONNECTIONS, max(soft - SPARE_DESCRIPTORS, SPARE_DESCRIPTORS)),
        accepts_per_second=ACCEPTS_PER_SECOND,
        accepts_at_once=MOST_CONNECTIONS,
        backlog=BACKLOG,
        body_seconds=STALL_SECONDS,
        answer_seconds=STALL_SECONDS,
        header_bytes=MOST_HEADER_BYTES,
    )
