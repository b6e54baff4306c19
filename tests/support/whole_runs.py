"""What has to be the same after an interruption, read from the directories that the ranks leave."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

from onstep.checkpoint import checkpoints, newest_verified
from onstep.record import read_records, without_wall_clock
from onstep.training.runs.run_dir import RunDir
from tests.support.forked_processes import Processes, output_of

JOBS = "tests.support.jobs.resume_jobs"


class Ranks:
    """Starts and continues runs of a module of jobs, by default `resume_jobs`, each in a directory of its own."""

    def __init__(self, processes: Processes, directory: Path, jobs: str = JOBS, **common: Any) -> None:
        self._processes = processes
        self.directory = directory
        self._jobs = jobs
        self.common = common
        self._starts: Counter[str] = Counter()

    def start(self, name: str, job: str = "pretrain", *, ranks: int = 2, **settings: Any) -> list[int]:
        """Start the run `name`, or continue it; the exit codes."""
        self._starts[name] += 1
        settings = {**self.common, **settings, "attempt": self._starts[name]}
        return self._processes.run(self._jobs, job, self.directory / name, settings, ranks=ranks)

    def finish(self, name: str, job: str = "pretrain", *, ranks: int = 2, **settings: Any) -> dict[str, Any]:
        """Start or continue the run `name`, which must end by itself; its outcome."""
        codes = self.start(name, job, ranks=ranks, **settings)
        assert codes == [0] * ranks, (codes, output_of(self.directory / name))
        return outcome(self.directory / name)

    def root(self, name: str) -> Path:
        """The directory of a run's checkpoints."""
        return RunDir(self.directory / name / "runs" / "run").checkpoints

    def steps(self, name: str) -> list[int]:
        """The steps of the complete checkpoints, in order."""
        root = self.root(name)
        return sorted(info.step for info in checkpoints(root)) if root.exists() else []

    def status(self, name: str) -> str:
        """What run.json says; nothing where the run has none yet."""
        path = self.directory / name / "runs" / "run" / "run.json"
        return str(json.loads(path.read_text())["status"]) if path.exists() else ""

    def output(self, name: str) -> str:
        """What the ranks printed."""
        return output_of(self.directory / name)

    def forget_output(self, name: str) -> None:
        """Let `output` begin anew."""
        for path in (self.directory / name).glob("rank-*.out"):
            path.unlink()


def outcome(directory: Path) -> dict[str, Any]:
    """Everything of a finished run that an interruption must not change, and the calls of its callback."""
    notified = [json.loads(path.read_text())["told"] for path in sorted(directory.glob("result-?.json"))]
    return {**left_by(directory / "runs" / "run"), "told": notified}


def left_by(run: Path) -> dict[str, Any]:
    """What a finished run leaves in its directory, without what a clock has written."""
    newest = newest_verified(RunDir(run).checkpoints)
    assert newest is not None
    files = newest.manifest.files
    exact = {path: entry.blake3 for path, entry in files.items() if path.startswith(("model/", "optimizer/", "rng/"))}
    weights = RunDir(run).model / "model.safetensors"
    return {
        "step": newest.step,
        "files": exact,
        "weights": hashlib.sha256(weights.read_bytes()).hexdigest() if weights.exists() else None,
        "certificates": [json.loads(path.read_text()) for path in sorted((run / "certificate").glob("chain.json"))],
        "journal": [without_wall_clock(record) for record in read_records(run / "trainer_logs.json")],
    }


def check_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Check part by part, so that a failure names the first."""
    for part, value in expected.items():
        assert found[part] == value, (part, found[part], value)


def taken(directory: Path) -> dict[int, dict[str, Any]]:
    """By step: the epoch, the samples of all ranks and the loss, of the branch that the run kept."""
    steps: dict[int, dict[str, Any]] = {}
    for attempt in _attempts(directory):
        steps = {step: record for step, record in steps.items() if step < min(attempt)}
        steps |= attempt
    return steps


def samples_of_epochs(directory: Path) -> dict[int, Counter[int]]:
    """How often each sample was taken in each epoch."""
    epochs: dict[int, Counter[int]] = {}
    for record in taken(directory).values():
        epochs.setdefault(record["epoch"], Counter()).update(record["ids"])
    return epochs


def _attempts(directory: Path) -> list[dict[int, dict[str, Any]]]:
    """What all ranks of each start of the run took, by step."""
    attempts: dict[int, dict[int, dict[str, Any]]] = {}
    for path in sorted(directory.glob("taken-?.jsonl")):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            one = attempts.setdefault(record["attempt"], {}).setdefault(record["step"], {**record, "ids": []})
            one["ids"] += record["ids"] or []
    return [attempts[number] for number in sorted(attempts)]
