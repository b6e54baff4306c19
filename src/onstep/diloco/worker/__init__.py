"""Makes a model and its optimizer a worker of a DiLoCo run: `DiLoCoWorker`, around any training loop.

`parameters` reads and writes the model on all ranks, `fragment` computes differences and merges, `exchange` submits and
fetches on the main rank (`task` in other threads), `heartbeat` and `pace` tell the server how fast, `work` is all
of it between start and stop.
"""

from onstep.diloco.worker.worker import DiLoCoWorker

__all__ = ["DiLoCoWorker"]
