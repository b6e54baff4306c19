"""The server: `masters` are the parameters that it steps (`averaging` does the sums), `store` has everything on disk,
`served_run` joins both with the protocol's coordinator, `app` speaks HTTP (with `guard`, `receiving` and `sending` of
tensors, `control`), `serving` runs it in a thread, `initial` says where the parameters come from, `weights` writes them
for other programs, `operator` is what can be asked and changed from outside, `server` is the class that users see.
"""

from onstep.diloco.server.server import DiLoCoServer

__all__ = ["DiLoCoServer"]
