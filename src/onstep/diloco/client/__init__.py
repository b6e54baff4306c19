"""Talks to the server of a run: `connection` speaks HTTP, `membership` joins, submits and fetches, and `client` is the
class for a program's own loop.
"""

from onstep.diloco.client.client import DiLoCoClient, SubmissionDroppedError
from onstep.diloco.protocol.operations import RefusedByServerError, ServerLostError

__all__ = ["DiLoCoClient", "RefusedByServerError", "ServerLostError", "SubmissionDroppedError"]
