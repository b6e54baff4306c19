"""`onstep train` in processes of its own, with a callback that sends them signals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from onstep.checkpoint import checkpoints
from onstep.record import read_records, without_wall_clock
from tests.support.forked_processes import Processes

STRUCK = Path(__file__).parent / "scripts" / "struck.py"
JOBS = "tests.support.jobs.resume_jobs"
SMALL = [
    "dataset.split=80,10,10",
    "dataset.num_workers=0",
    "dataset.seq_length=32",
    "model.seq_length=32",
    "model.num_layers=1",
    "model.hidden_size=16",
    "model.num_attention_heads=2",
    "model.hidden_dropout=0.1",
    "train.global_batch_size=4",
    "train.train_iters=9",
    "scheduler.lr_warmup_iters=2",
    "validation.eval_on_start=false",
    "validation.eval_interval=4",
    "validation.eval_iters=2",
    "logger.log_interval=2",
    "checkpoint.certify=true",
    "checkpoint.save_interval=null",
    "dist.device=cpu",
]


class Command:
    """`onstep train` in directories of its own, with a callback that sends signals."""

    def __init__(self, processes: Processes, directory: Path, corpus: Path, cache: Path) -> None:
        self._processes = processes
        self.directory = directory
        self._small = [*SMALL, f"dataset.paths=[{corpus}]", f"dataset.cache_dir={cache}"]

    def argv(self, *words: str) -> list[str]:
        return ["train", "--import", str(STRUCK), "callbacks=[struck:Struck]", *self._small, *words]

    def start(self, name: str, *words: str, strike: dict[str, Any] | None = None, **settings: Any) -> int:
        """Start or continue the run of a directory; the exit code."""
        place = self.directory / name
        place.mkdir(exist_ok=True)
        (place / "strike.json").unlink(missing_ok=True)
        if strike is not None:
            (place / "strike.json").write_text(json.dumps(strike))
        [code] = self._processes.run(JOBS, "cli", place, {"argv": self.argv(*words), **settings})
        return code

    def steps(self, name: str) -> list[int]:
        return sorted(info.step for info in checkpoints(self.run(name) / "checkpoints"))

    def run(self, name: str) -> Path:
        return self.directory / name / "runs" / "tiny_gpt"

    def status(self, name: str) -> str:
        return str(json.loads((self.run(name) / "run.json").read_text())["status"])

    def ends(self, name: str) -> list[str]:
        """What each process reported at its end, the newest last."""
        return (self.directory / name / "ends.txt").read_text().splitlines()

    def outcome(self, name: str) -> dict[str, Any]:
        run = self.run(name)
        return {
            "certificate": json.loads((run / "certificate" / "chain.json").read_text()),
            "weights": (run / "model" / "model.safetensors").read_bytes(),
            "journal": [without_wall_clock(record) for record in read_records(run / "trainer_logs.json")],
        }
