"""The client: `connection` speaks HTTP with one server, `shares` makes several servers look like one, and `client` is
the class that users see.
"""

from onstep.diloco.client.client import DiLoCoClient
from onstep.diloco.client.connection import ServerLostError

__all__ = ["DiLoCoClient", "ServerLostError"]
