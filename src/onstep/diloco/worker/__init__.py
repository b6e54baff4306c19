"""Makes a model and its optimizer a worker of a DiLoCo run: `DiLoCoWorker`, around any training loop.

`synchronizer` submits and merges on all ranks from start to stop, with `parameters` to read and write the model and
`progress` to count its work; `exchange` is rank 0's side of it, with a `fragment` for each part of the model;
`heartbeat` reports the `pace`.
"""

from onstep.diloco.worker.worker import DiLoCoWorker

__all__ = ["DiLoCoWorker"]
