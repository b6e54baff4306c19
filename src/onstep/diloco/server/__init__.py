"""The server: `masters` are the parameters that it steps (`averaging` does the sums), `store` has everything on disk,
`served_run` joins both with the protocol's coordinator, `initial` says where the parameters come from and what a server
that continues a run has to be given, `weights` writes checkpoints for other programs, `operator` is what can be asked
and changed from outside, `serving/` speaks HTTP, `server` is the class that users see.
"""

from typing import TYPE_CHECKING

from onstep.lazy_names import lazy_names

if TYPE_CHECKING:
    from onstep.diloco.server.server import DiLoCoServer

__all__ = ["DiLoCoServer"]

__getattr__, __dir__ = lazy_names(__name__)
