"""A save that stays under way until it is killed; a script for: directory, step. Starts a worker that outlives it."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from onstep.checkpoint.storage.store import FileStore
from onstep.checkpoint.storage.transaction import SaveTransaction


def main() -> None:
    """Prepare a save, fork a worker like a data loader's, tell the directory and the worker, and wait."""
    store = FileStore()
    transaction = SaveTransaction(store, Path(sys.argv[1]), int(sys.argv[2]))
    transaction.prepare()
    store.write_file(transaction.directory / "part", b"half of it")
    worker = os.fork()
    if worker == 0:
        os.close(sys.stdout.fileno())
        time.sleep(60)
        os._exit(0)
    print(transaction.directory, worker, flush=True)
    time.sleep(60)


if __name__ == "__main__":
    main()
