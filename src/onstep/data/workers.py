"""Worker processes that end when they are no longer needed."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from onstep.pulse import PULSE


def batches_from_workers(loader: DataLoader[Any]) -> Iterator[Any]:
    """One pass over `loader`, whose workers end with it, also after an error, unless they are persistent."""
    iterator = iter(loader)
    try:
        for batch in iterator:
            PULSE.beats += 1
            yield batch
    finally:
        if not loader.persistent_workers:
            end_workers(iterator)


def end_workers(iterator: Any) -> None:
    """End the worker processes of an iterator of a DataLoader.

    Torch has no public name for it. Without, they end when the iterator is collected, which after an error comes late
    and takes five seconds; a public `close` would let this go.
    """
    iterator._shutdown_workers()


def outlive_the_group(worker_id: int) -> None:
    """`worker_init_fn`: SIGTERM ends a worker only when its own parent sends it.

    A scheduler that stops a job signals the whole process group. The main process then finishes its step and saves, for
    which it may need the batches that its workers still read.
    """
    parent = os.getppid()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)
