"""A save in a process of its own: a script for driver, directory, step, edition. Prints its operations as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from onstep.checkpoint.storage.store import FileStore
from tests.support.faults.fault_saves import DRIVERS, Recorder


def main() -> None:
    """Save once."""
    driver, directory, step, edition = sys.argv[1:]
    recorder = Recorder()
    DRIVERS[driver].save(Path(directory), int(step), edition, FileStore(recorder))
    notified = [[each.kind, str(each.path), str(each.target or ""), each.size] for each in recorder.operations]
    print(json.dumps(notified))


if __name__ == "__main__":
    main()
