"""Makes a model and its optimizer a worker of a DiLoCo run: `DiLoCoWorker`, around any training loop.

`parameters` reads and writes the model on all ranks, `fragment` computes differences and merges, `exchange` submits and
fetches on the main rank, `link` runs the protocol over a client, `heartbeat` and `pace` tell the server how fast.
"""

from onstep.diloco.worker.worker import DiLoCoWorker

__all__ = ["DiLoCoWorker"]
