"""`onstep train` whose run directory is on a disk that is full from step 3 on: killed, then started again with room.

Another run has room again after step 7, and goes on. A script for: directory on the small disk, directory of the
checkpoints, corpus, token cache. Prints JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from onstep.cli.main import main as onstep
from tests.support.tracker_files import metrics_log_values, scalars, table
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


def shown_by(run: Path) -> dict[str, Any]:
    """The losses by step in each file of a run that shows them."""
    rows = table(run / "metrics.csv")
    rows = rows[(rows.kind == "train") & rows["loss"].notna()]
    return {
        "trainer_logs.json": metrics_log_values(run / "trainer_logs.json", "loss"),
        "record.jsonl": metrics_log_values(run / "record.jsonl", "loss"),
        "metrics.csv": list(zip(map(int, rows.step), map(float, rows["loss"]), strict=True)),
        "tensorboard": scalars(run / "tensorboard")["train/loss"],
        "gaps": sum(b"missing_records" in (run / name).read_bytes() for name in ("trainer_logs.json", "record.jsonl")),
    }


def main() -> None:
    """Kill a run while its disk is full, make room, and start it again; make room in another run."""
    for name in ("torch._dynamo", "onstep.training", "onstep.analysis.plots.plots"):
        importlib.import_module(name)  # once, for all trainings
    disk, elsewhere, corpus, cache = map(Path, sys.argv[1:])
    data = [f"dataset.paths=[{corpus}]", f"dataset.cache_dir={cache}", "logger.report_to=[csv,tensorboard]"]
    every = ["logger.log_interval=1", "checkpoint.save_interval=5", "checkpoint.certify=false"]
    filler, report = disk / "filler", dict[str, Any]()

    def start(name: str, **environment: str) -> int:
        places = [f"run.output_dir={disk / 'runs'}", f"run.name={name}", f"checkpoint.save={elsewhere / name}"]
        return train([*SMALL, *places, *data, *every], elsewhere / f"{name}.txt", **environment)

    killed, waits = disk / "runs" / "killed", disk / "runs" / "waits"
    report |= {"killed": start("killed", FILLER=str(filler)), "full": (killed / "trainer_logs.json").read_text()}
    filler.unlink()
    report |= {"resumed": start("killed"), "whole": shown_by(killed)}
    shutil.rmtree(killed)
    report |= {"waited": start("waits", FILLER=str(filler), MAKES_ROOM="1"), "in one process": shown_by(waits)}
    report["output"] = "".join((elsewhere / f"{name}.txt").read_text() for name in ("killed", "waits"))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
