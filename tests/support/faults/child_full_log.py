"""`onstep train` whose run directory is on a disk that is full from step 3 on: killed, then started again with room.

A script for: directory on the small disk, directory of the checkpoints, corpus, token cache. Prints JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from onstep.cli.main import main as onstep
from tests.support.train_command import SMALL

SCRIPT = Path(__file__).parents[1] / "scripts" / "fills_disk.py"


def train(words: list[str], log: Path, **environment: str) -> int:
    """The exit code of a training in a process of its own, or minus the signal."""
    child = os.fork()
    if child == 0:
        os.environ.update(environment)
        with log.open("ab", buffering=0) as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os._exit(onstep(["train", "--import", str(SCRIPT), "callbacks=[fills_disk:FillsDisk]", *words]))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> None:
    """Kill the run while its disk is full, make room, and start it again."""
    disk, elsewhere, corpus, cache = map(Path, sys.argv[1:])
    places = [f"run.output_dir={disk / 'runs'}", "run.name=run", f"checkpoint.save={elsewhere / 'checkpoints'}"]
    data = [f"dataset.paths=[{corpus}]", f"dataset.cache_dir={cache}"]
    every = ["logger.log_interval=1", "checkpoint.save_interval=5", "checkpoint.certify=false"]
    words, log, filler = [*SMALL, *places, *data, *every], elsewhere / "output.txt", disk / "filler"
    metrics_log = disk / "runs" / "run" / "trainer_logs.json"
    report = {"killed": train(words, log, FILLER=str(filler)), "full": metrics_log.read_text()}
    filler.unlink()
    report |= {"resumed": train(words, log), "whole": metrics_log.read_text(), "output": log.read_text()}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
