"""Small trainings that are mirrored, and what an empty machine finds of them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from onstep.checkpoint import read_manifest
from onstep.mirror.remote_checkpoints import RemoteCheckpoints
from onstep.mirror.run_files import RunFiles
from onstep.record import read_records, without_wall_clock
from onstep.stores.bucket import Bucket
from onstep.stores.lease import LEASE, LeaseState, parse_lease
from tests.support.forked_processes import Child, Processes, output_of
from tests.support.object_store import SECRETS, environment_of

JOBS = "tests.support.jobs.store_jobs"


def lease_of(url: str) -> LeaseState:
    """The lease of a run."""
    found = Bucket(url).get(LEASE)
    assert found is not None
    return parse_lease(found[0], url)


def committed(url: str) -> list[int]:
    """The steps of the checkpoints of a run, the newest first."""
    return [one.step for one in RemoteCheckpoints(Bucket(url)).all() if one.is_committed]


class MirroredRuns:
    """Trains in processes of their own.

    Args:
        processes: which fork them.
        corpus: what is trained on.
        cache: for its tokens.
        url: where the runs are.
        address: of the server, for the processes; the environment's by default.
    """

    def __init__(self, processes: Processes, corpus: Path, cache: Path, url: str, address: str | None = None) -> None:
        self._processes, self._data, self.url = processes, {"corpus": str(corpus), "cache": str(cache)}, url
        known = {name: os.environ[name] for name in environment_of("") if name in os.environ}
        self._environment = known if address is None else environment_of(address)

    def start(self, machine: Path, *, ranks: int = 1, **settings: Any) -> list[Child]:
        """Train on a machine, which is a directory, and wait for nothing."""
        return self._processes.start(JOBS, "train", machine, self._given(settings), ranks=ranks)

    def train(self, machine: Path, **settings: Any) -> int:
        """Train on a machine until the end; the exit code."""
        [code] = self._processes.run(JOBS, "train", machine, self._given(settings))
        return code

    def _given(self, settings: dict[str, Any]) -> dict[str, Any]:
        environment = self._environment | settings.pop("environment", {})
        return {**self._data, "output_dir": self.url, "environment": environment, "attempt": 0, **settings}


def outcome(url: str, place: Path) -> dict[str, Any]:
    """What an empty machine gets of a run: the logs and the newest checkpoint."""
    run, remote = place / "run", RemoteCheckpoints(Bucket(url))
    RunFiles(Bucket(url), run).fetch()
    newest = remote.fetch(remote.valid(lease_of(url))[0], place / "checkpoints")
    manifest = read_manifest(newest)
    return {
        "step": manifest.step,
        "files": {name: digest for name, digest in manifest.files.items() if name.startswith(("model/", "optimizer/"))},
        "certificate": json.loads((run / "certificate" / "chain.json").read_text()),
        "logs": [without_wall_clock(record) for record in read_records(run / "trainer_logs.json")],
        "status": json.loads((run / "run.json").read_text())["status"],
    }


def check_that_an_empty_machine_continues(runs: MirroredRuns, place: Path) -> None:
    """A run that is killed on two machines, and ends on a third one, has the bits of one that nobody disturbs."""
    whole = f"{runs.url}/whole"
    assert runs.train(place / "whole", output_dir=whole) == 0, output_of(place / "whole")
    for machine, step in (("first", 5), ("second", 9)):
        code = runs.train(place / machine, kill={"step": step, "has": step - 1})
        assert code == -9, output_of(place / machine)
    assert runs.train(place / "third") == 0, output_of(place / "third")
    undisturbed, split = outcome(f"{whole}/run", place / "a"), outcome(f"{runs.url}/run", place / "b")
    assert undisturbed["step"] == 11
    assert undisturbed["status"] == "completed"
    assert split == undisturbed
    assert len(set(committed(f"{runs.url}/run"))) == 2  # as many as most_recent_k keeps
    check_no_secret(place, runs.url)
    taken = [json.loads(line)["step"] for line in (place / "third" / "taken-0.jsonl").read_text().splitlines()]
    assert taken == [9, 10, 11]


def check_no_secret(place: Path, url: str) -> None:
    """Neither files, which have what processes print, nor objects contain the credentials that they are given."""
    bucket = Bucket(url)
    texts = [(str(path), path.read_bytes()) for path in place.rglob("*") if path.is_file()]
    texts += [(one.name, (bucket.get(one.name) or (b"", None))[0]) for one in bucket.list()]
    assert len(texts) > 10
    assert not [name for name, text in texts for secret in SECRETS if secret.encode() in text]
