"""What has to be the same after an interruption, read from the folders that the ranks leave."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forked_processes import Processes, output_of
from onstep.checkpoint import checkpoints, newest_verified
from onstep.metrics_log import read_records, without_wall_clock

JOBS = Path(__file__).parent / "distributed" / "resume_jobs.py"


class Ranks:
    """Starts and continues runs of a script, by default `resume_jobs.py`, each in a folder of its own."""

    def __init__(self, processes: Processes, folder: Path, script: Path = JOBS, **common: Any) -> None:
        self._processes = processes
        self.folder = folder
        self._script = script
        self.common = common
        self._starts: Counter[str] = Counter()

    def start(self, name: str, job: str = "pretrain", *, ranks: int = 2, **settings: Any) -> list[int]:
        """Start the run `name`, or continue it; the exit codes."""
        self._starts[name] += 1
        settings = {**self.common, **settings, "attempt": self._starts[name]}
        return self._processes.run(self._script, job, self.folder / name, settings, ranks=ranks)

    def finish(self, name: str, job: str = "pretrain", *, ranks: int = 2, **settings: Any) -> dict[str, Any]:
        """Start or continue the run `name`, which must end by itself; its outcome."""
        codes = self.start(name, job, ranks=ranks, **settings)
        assert codes == [0] * ranks, (codes, output_of(self.folder / name))
        return outcome(self.folder / name)

    def root(self, name: str) -> Path:
        """The folder of a run's checkpoints."""
        return self.folder / name / "runs" / "run" / "checkpoints"

    def steps(self, name: str) -> list[int]:
        """The steps of the complete checkpoints, in order."""
        root = self.root(name)
        return sorted(info.step for info in checkpoints(root)) if root.exists() else []

    def status(self, name: str) -> str:
        """What run.json says; nothing where the run has none yet."""
        path = self.folder / name / "runs" / "run" / "run.json"
        return str(json.loads(path.read_text())["status"]) if path.exists() else ""

    def output(self, name: str) -> str:
        """What the ranks printed."""
        return output_of(self.folder / name)

    def forget_output(self, name: str) -> None:
        """Let `output` begin anew."""
        for path in (self.folder / name).glob("rank-*.out"):
            path.unlink()


@contextmanager
def forked() -> Iterator[Processes]:
    """A server for the processes of a module's tests."""
    processes = Processes()
    try:
        yield processes
    finally:
        processes.close()


def outcome(folder: Path) -> dict[str, Any]:
    """Everything of a finished run that an interruption must not change."""
    run = folder / "runs" / "run"
    newest = newest_verified(run / "checkpoints")
    assert newest is not None
    files = newest.manifest.files
    exact = {path: entry.blake3 for path, entry in files.items() if path.startswith(("model/", "optimizer/", "rng/"))}
    weights = run / "model" / "model.safetensors"
    return {
        "step": newest.step,
        "files": exact,
        "weights": hashlib.sha256(weights.read_bytes()).hexdigest() if weights.exists() else None,
        "certificates": [json.loads(path.read_text()) for path in sorted((run / "certificate").glob("rank_?.json"))],
        "journal": [without_wall_clock(record) for record in read_records(run / "trainer_logs.json")],
        "told": [json.loads(path.read_text())["told"] for path in sorted(folder.glob("result-?.json"))],
    }


def check_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Check part by part, so that a failure names the first."""
    for part, value in expected.items():
        assert found[part] == value, part


def taken(folder: Path) -> dict[int, dict[str, Any]]:
    """By step: the epoch, the samples of all ranks and the loss, of the branch that the run kept."""
    steps: dict[int, dict[str, Any]] = {}
    for attempt in _attempts(folder):
        steps = {step: record for step, record in steps.items() if step < min(attempt)}
        steps |= attempt
    return steps


def samples_of_epochs(folder: Path) -> dict[int, Counter[int]]:
    """How often each sample was taken in each epoch."""
    epochs: dict[int, Counter[int]] = {}
    for record in taken(folder).values():
        epochs.setdefault(record["epoch"], Counter()).update(record["ids"])
    return epochs


def _attempts(folder: Path) -> list[dict[int, dict[str, Any]]]:
    """What all ranks of each start of the run took, by step."""
    attempts: dict[int, dict[int, dict[str, Any]]] = {}
    for path in sorted(folder.glob("taken-?.jsonl")):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            one = attempts.setdefault(record["attempt"], {}).setdefault(record["step"], {**record, "ids": []})
            one["ids"] += record["ids"] or []
    return [attempts[number] for number in sorted(attempts)]
