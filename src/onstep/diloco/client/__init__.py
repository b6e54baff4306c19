"""Talks to the servers of a run: `connection` speaks HTTP with one server, `servers` makes several look like one,
`membership` joins, submits and fetches, and `client` is the class for a program's own loop.
"""

from onstep.diloco.client.client import DiLoCoClient, SubmissionDroppedError
from onstep.diloco.protocol.session import RefusedByServerError, ServerLostError

__all__ = ["DiLoCoClient", "RefusedByServerError", "ServerLostError", "SubmissionDroppedError"]
