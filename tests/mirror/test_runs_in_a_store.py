"""A run whose files are in an object store continues on a machine that has none of them, bit for bit."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onstep.checkpoint import read_manifest
from onstep.mirror.remote_checkpoints import RemoteCheckpoints
from onstep.mirror.run_files import RunFiles
from onstep.record import read_records, without_wall_clock
from onstep.stores.bucket import Bucket
from onstep.stores.lease import LEASE, Lease, parse_lease
from tests.support.forked_processes import Processes, output_of
from tests.support.object_store import BUCKET, SECRET, environment_of, s3_server
from tests.support.waiting import until

JOBS = "tests.support.jobs.store_jobs"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.fixture(params=["s3", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    is_s3 = request.param == "s3"
    for name, value in environment_of(request.getfixturevalue("server") if is_s3 else "").items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{tmp_path.name}" if is_s3 else f"file://{tmp_path}/store"


def train(processes: Processes, machine: Path, corpus: Path, cache: Path, url: str, **settings: Any) -> int:
    environment = {name: os.environ[name] for name in environment_of("")}
    given = {"corpus": str(corpus), "cache": str(cache), "output_dir": url, "environment": environment, "attempt": 0}
    [code] = processes.run(JOBS, "train", machine, given | settings)
    return code


def outcome(url: str, place: Path) -> dict[str, Any]:
    """What an empty machine gets: the logs and the newest checkpoint."""
    bucket, run = Bucket(f"{url}/run"), place / "run"
    RunFiles(bucket, run).fetch()
    found = bucket.get(LEASE)
    assert found is not None
    remote = RemoteCheckpoints(bucket)
    newest = remote.fetch(remote.valid(parse_lease(found[0], url))[0], place / "checkpoints")
    manifest = read_manifest(newest)
    return {
        "step": manifest.step,
        "files": {name: digest for name, digest in manifest.files.items() if name.startswith(("model/", "optimizer/"))},
        "certificate": json.loads((run / "certificate" / "chain.json").read_text()),
        "logs": [without_wall_clock(record) for record in read_records(run / "trainer_logs.json")],
        "status": json.loads((run / "run.json").read_text())["status"],
    }


def test_an_empty_machine_continues_bit_for_bit(
    processes: Processes, tmp_path: Path, corpus: Path, cache: Path, url: str
) -> None:
    assert train(processes, tmp_path / "whole", corpus, cache, f"{url}/whole") == 0, output_of(tmp_path / "whole")
    for machine, step in (("first", 5), ("second", 9)):
        code = train(processes, tmp_path / machine, corpus, cache, url, kill={"step": step, "has": step - 1})
        assert code == -9, output_of(tmp_path / machine)
    assert train(processes, tmp_path / "third", corpus, cache, url) == 0, output_of(tmp_path / "third")
    whole, split = outcome(f"{url}/whole", tmp_path / "a"), outcome(url, tmp_path / "b")
    assert whole["step"] == 11
    assert whole["status"] == "completed"
    assert split == whole
    steps = {one.step for one in RemoteCheckpoints(Bucket(f"{url}/run")).all()}
    assert len(steps) == 2  # as many as most_recent_k keeps
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    taken = [json.loads(line)["step"] for line in (tmp_path / "third" / "taken-0.jsonl").read_text().splitlines()]
    assert taken == [9, 10, 11]
    assert SECRET not in output_of(tmp_path / "third")


@pytest.mark.parametrize("url", ["s3"], indirect=True)
def test_a_run_that_is_taken_over_ends_with_an_error(
    processes: Processes, tmp_path: Path, corpus: Path, cache: Path, url: str
) -> None:
    environment = {name: os.environ[name] for name in environment_of("")}
    given = {"corpus": str(corpus), "cache": str(cache), "output_dir": url, "environment": environment, "attempt": 0}
    [child] = processes.start(JOBS, "train", tmp_path / "machine", given | {"slow": 0.5})
    bucket = Bucket(f"{url}/run")
    remote = RemoteCheckpoints(bucket)
    until(remote.all, lambda: output_of(tmp_path / "machine"), while_true=lambda: child.is_alive)
    content, _ = bucket.get(LEASE) or (b"", None)
    heir, _ = Lease.take(bucket, "heir", "an heir", seconds=60.0, own=[parse_lease(content, url).owner])
    heir.settle(one.name for one in remote.all() if one.is_committed)
    assert child.wait() == 1
    assert "was taken over by an heir" in output_of(tmp_path / "machine")
    assert parse_lease((bucket.get(LEASE) or (b"", None))[0], url).owner == "heir"
