"""The client: `connection` speaks HTTP with one server, `shares` makes several servers look like one, `link` runs the
protocol over them, `versions` reads what they send, `membership` is what one worker has submitted, and `client` is the
class that users see.
"""

from onstep.diloco.client.client import DiLoCoClient
from onstep.diloco.client.connection import RefusedByServerError, ServerLostError
from onstep.diloco.client.membership import SubmissionDroppedError

__all__ = ["DiLoCoClient", "RefusedByServerError", "ServerLostError", "SubmissionDroppedError"]
