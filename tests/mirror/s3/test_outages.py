"""While the store cannot be reached, training continues in bounded space; what is due is uploaded afterwards."""

from __future__ import annotations

import logging
import os
import time
from contextlib import suppress
from pathlib import Path

import pytest

from onstep.checkpoint import Retention, checkpoints
from onstep.mirror import mirror as mirroring
from onstep.mirror import outage
from onstep.mirror.attach import attach
from onstep.mirror.remote_checkpoints import RemoteCheckpoints
from onstep.stores.bucket import Bucket
from tests.support.faulty_proxy import Proxy
from tests.support.forked_processes import Processes, output_of
from tests.support.mirrored_places import commit, place_of
from tests.support.mirrored_runs import MirroredRuns, committed
from tests.support.object_store import STORE, environment_of
from tests.support.waiting import until

pytestmark = pytest.mark.process

SIZE = 100_000


@pytest.fixture
def line(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> Proxy:
    """The process of the test reaches the server through the proxy."""
    for name, value in environment_of(proxy.url).items():
        monkeypatch.setenv(name, value)
    return proxy


def test_an_outage_is_survived_in_bounded_space(
    line: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mirroring, "PAUSES_SECONDS", (0.1, 0.2))
    monkeypatch.setattr(mirroring, "LOOK_SECONDS", 0.05)
    caplog.set_level(logging.INFO)
    url = f"{STORE}/{tmp_path.name}"
    mirror = attach(place_of(url, tmp_path, limit_bytes=3.5 * SIZE), Retention())
    mirror.start()
    commit(mirror, 1, size=SIZE)
    remote = RemoteCheckpoints(Bucket(url))
    until(lambda: [one.step for one in remote.all() if one.is_committed] == [1])
    line.is_dead = True
    for step in range(2, 8):
        commit(mirror, step, size=SIZE)
        until(lambda step=step: len(checkpoints(mirror.root)) <= 2)
    until(lambda: "due is uploaded later" in caplog.text)
    line.is_dead = False
    until(lambda: "everything that was due is in" in caplog.text)
    mirror.close()
    assert mirror.lost is None
    assert {one.step for one in remote.all() if one.is_committed} >= {1, 7}
    assert all(one.is_committed for one in remote.all())
    assert caplog.text.count("due is uploaded later") == 1
    [back] = [text for text in caplog.messages if "can be reached again" in text]
    assert "7 and files of the run, 0." in back.partition("due: ")[2]


def test_a_server_that_does_not_answer_is_named_before_requests_fail(
    line: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mirroring, "SILENT_SECONDS", 0.3)
    monkeypatch.setattr(mirroring, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(outage, "AGAIN_SECONDS", 0.5)
    url = f"{STORE}/{tmp_path.name}"
    mirror = attach(place_of(url, tmp_path), Retention())
    mirror.start()
    line.decide = lambda number, method, path: "wait"
    commit(mirror, 1)
    until(lambda: "has not answered for 0.3 s. The run continues" in caplog.text)
    commit(mirror, 2)
    until(lambda: "could not be used for" in caplog.text)
    line.go.set()
    until(lambda: "everything that was due is in" in caplog.text)
    assert committed(url) == [2, 1]
    mirror.close()


def test_the_end_of_a_run_says_what_is_not_uploaded(
    line: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mirroring, "END_SECONDS", 0.1)
    url = f"{STORE}/{tmp_path.name}"
    mirror = attach(place_of(url, tmp_path), Retention())
    commit(mirror, 1)
    line.is_dead = True
    mirror.close()
    assert f"what is not there yet is in {mirror.directory}" in caplog.text
    assert mirror.unfinished is not None
    line.is_dead = False
    attach(place_of(url, tmp_path), Retention()).close()  # the same machine uploads it
    assert committed(url) == [1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["closed", "silent"])
@pytest.mark.parametrize(
    "seconds", [pytest.param(60, id="minute"), pytest.param(600, id="ten-minutes", marks=pytest.mark.timeout(1200))]
)
def test_training_goes_on_while_the_network_is_dead(
    proxy: Proxy, processes: Processes, tmp_path: Path, corpus: Path, token_cache: Path, kind: str, seconds: int
) -> None:
    """Connections are closed at once, or nothing is answered and everything arrives at the end."""
    runs = MirroredRuns(processes, corpus, token_cache, f"{STORE}/{tmp_path.name}", proxy.url)
    machine, url, limit = tmp_path / "machine", f"{runs.url}/run", 2_000_000
    settings = {"scratch_gib": limit / 1024**3, "save_interval": 5, "again": seconds / 3, "most_recent_k": -1}
    words = ["train.train_iters=100000", "validation.eval_interval=100000", "checkpoint.certify=false"]
    [child] = runs.start(machine, slow=0.5, words=words, lease_seconds=20.0, **settings)
    until(lambda: committed(url), lambda: output_of(machine), while_true=lambda: child.is_alive)
    proxy.is_dead, proxy.decide = kind == "closed", lambda number, method, path: "wait"
    began, most, steps, first = time.monotonic(), 0, 0, None
    before = output_of(machine).count("is done")
    while time.monotonic() - began < seconds:
        most = max(most, local_bytes(machine))
        if first is None and "The run continues" in output_of(machine):
            first = time.monotonic() - began
        time.sleep(0.2)
        assert child.is_alive, output_of(machine)
    said = (machine / "rank-0.out").read_text()
    steps, kept = said.count("is done") - before, committed(url)
    proxy.is_dead, proxy.decide = False, lambda number, method, path: "pass"
    proxy.go.set()
    until(lambda: "everything that was due is in" in output_of(machine), lambda: output_of(machine))
    later = committed(url)
    lines = [line for line in (machine / "rank-0.out").read_text().splitlines() if url in line]
    print(*lines, sep="\n")
    print(f"{steps} steps in {seconds} s; first words after {first} s; at most {most:,} bytes; {kept[0]} -> {later[0]}")
    child.end()
    child.wait()
    assert first is not None
    assert steps > seconds
    assert max(later) > max(kept)
    assert most <= limit
    assert len(lines) < 10


def local_bytes(machine: Path) -> int:
    """Of complete checkpoints, and of links to one that is uploaded; each file once."""
    found = {}
    for folder, folders, names in os.walk(machine / "scratch"):
        folders[:] = [name for name in folders if not name.startswith((".tmp", "tmp-"))]
        for name in names if "checkpoint-" in folder or "uploading" in folder else []:
            with suppress(FileNotFoundError):
                facts = os.stat(Path(folder, name))
                found[facts.st_ino] = facts.st_size
    return sum(found.values())
