"""Trains one model at several sites over ordinary networks (DiLoCo): workers train, a server averages now and then.

`protocol/` is what both sides say to each other and decide, without sockets, clocks or threads of its own; `outer` and
`fragments` are the algorithm; `codec/` compresses what is sent; `server/` and `client/` speak HTTP; `worker/` is
between the protocol and a model; `group/` does without a server, where sites have a process group; `simulator/` drives
the protocol with a virtual clock and network.

    from onstep.diloco import DiLoCoClient, DiLoCoServer, DiLoCoWorker, Sites, divide_into_sites
"""

from typing import TYPE_CHECKING

from onstep.lazy_names import lazy_names

if TYPE_CHECKING:
    from onstep.diloco.client import DiLoCoClient
    from onstep.diloco.group import Sites, divide_into_sites
    from onstep.diloco.server.server import DiLoCoServer
    from onstep.diloco.worker import DiLoCoWorker

__all__ = ["DiLoCoClient", "DiLoCoServer", "DiLoCoWorker", "Sites", "divide_into_sites"]

__getattr__, __dir__ = lazy_names(__name__)
