"""A save in a process of its own: a script for driver, folder, step, edition. Prints its operations as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from fault_saves import DRIVERS, Recorder

from onstep.checkpoint.storage.store import FileStore


def main() -> None:
    """Save once."""
    driver, folder, step, edition = sys.argv[1:]
    recorder = Recorder()
    DRIVERS[driver].save(Path(folder), int(step), edition, FileStore(recorder))
    told = [[each.kind, str(each.path), str(each.target or ""), each.size] for each in recorder.operations]
    print(json.dumps(told))


if __name__ == "__main__":
    main()
