"""Whatever happens to a process and its requests: whole checkpoints of one writer, of which the newest loads."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from onstep.checkpoint import Retention, read_manifest, verify
from onstep.errors import LostLeaseError, RunExistsError
from onstep.mirror.attach import attach
from onstep.mirror.mirror import Mirror
from onstep.mirror.remote_checkpoints import RemoteCheckpoints
from onstep.mirror.run_files import RunFiles
from onstep.stores.bucket import Bucket
from onstep.stores.lease import LEASE, parse_lease
from tests.support.faulty_proxy import FAULTS, Fault, Proxy
from tests.support.forked_processes import Processes, output_of
from tests.support.mirrored_places import commit, place_of
from tests.support.object_store import STORE, environment_of

pytestmark = pytest.mark.process

JOBS = "tests.support.jobs.store_jobs"
LAST = 3
BRIEFLY = ("lose the answer",)
"""Faults that each test run tries; the others are slow tests."""


def mirror(processes: Processes, machine: Path, url: str, address: str, **settings: Any) -> int:
    given = {"url": url, "environment": environment_of(address), "until": LAST}
    [code] = processes.run(JOBS, "mirror", machine, given | settings)
    return code


def check(url: str, place: Path) -> int:
    """Check what is in the store; the newest step, 0 for none."""
    bucket = Bucket(url)
    remote, found = RemoteCheckpoints(bucket), bucket.get(LEASE)
    valid = remote.valid(None if found is None else parse_lease(found[0], url))
    for one in valid:
        there = remote.fetch(one, place)  # verifies every file
        content = (there / "model/model.safetensors").read_bytes()
        assert content == f"weights of {one.step} ".encode() * 50
        assert read_manifest(there).step == one.step
        shutil.rmtree(there)
    if valid:
        RunFiles(bucket, place / "files").fetch()
        logged = [int(line.split()[0]) for line in (place / "files/record.jsonl").read_text().splitlines()]
        assert set(range(1, valid[0].step + 1)) <= set(logged)
        assert logged == sorted(logged)
        shutil.rmtree(place / "files")
    return max((one.step for one in valid), default=0)


def strike(machine: Path) -> None:
    with suppress(ProcessLookupError):
        os.kill(int((machine / "pid").read_text()), signal.SIGKILL)


def killed_at(number: int, where: Fault) -> Any:
    return lambda index, method, path: where if index == number else ("drop" if index > number else "pass")


def test_a_process_killed_at_a_request_leaves_a_store_that_continues(
    processes: Processes, proxy: Proxy, tmp_path: Path, server: str, numbers: list[int]
) -> None:
    """Another machine, or the same one, goes on from the newest checkpoint of the store."""
    kills = 0
    for number in numbers:
        for where in ("stop before", "stop after"):
            url, machine = f"{STORE}/{tmp_path.name}-{number}-{where[5:]}", tmp_path / f"{number}-{where[5:]}"
            machine.mkdir()
            proxy.requests.clear()
            proxy.decide, proxy.strike = killed_at(number, where), lambda machine=machine: strike(machine)
            code = mirror(processes, machine, url, proxy.url)
            assert code in (0, -9), output_of(machine)
            kills += code == -9
            before = check(url, tmp_path / "empty")
            if number % 2:
                shutil.rmtree(machine / "scratch", ignore_errors=True)
            assert mirror(processes, machine, url, server) == 0, output_of(machine)
            assert int((machine / "started.json").read_text()) >= before
            assert check(url, tmp_path / "empty") == LAST
            steps = [one.step for one in RemoteCheckpoints(Bucket(url)).all()]
            assert steps == [LAST, LAST - 1]
    print(f"{kills} of {2 * len(numbers)} killed at a request")
    assert kills >= len(numbers)


def test_a_process_killed_at_random_instants_leaves_a_store_that_continues(
    processes: Processes, proxy: Proxy, tmp_path: Path, server: str, instants: int
) -> None:
    """Machines in turn, some of them empty; each continues from the newest checkpoint of the store, or a later one."""
    url, chance, newest, kills = f"{STORE}/{tmp_path.name}", random.Random(instants), 0, 0
    for number in range(instants):
        machine = tmp_path / f"machine-{chance.randrange(2)}"
        if chance.random() < 0.3:
            shutil.rmtree(machine, ignore_errors=True)
        settings = {"url": url, "environment": environment_of(server), "until": newest + 100}
        [child] = processes.start(JOBS, "mirror", machine, settings)
        time.sleep(chance.uniform(0.0, 2.0))
        child.end()
        kills += child.wait() == -signal.SIGKILL
        reached = check(url, tmp_path / "empty")
        assert reached >= newest, (number, output_of(machine))
        newest = reached
    assert mirror(processes, tmp_path / "last", url, server, until=newest + 1) == 0, output_of(tmp_path / "last")
    assert check(url, tmp_path / "empty") == newest + 1
    assert kills > instants // 4
    print(f"{kills} of {instants} killed, {newest} checkpoints")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "instants" in metafunc.fixturenames:
        storm = pytest.param(200, id="storm", marks=[pytest.mark.slow, pytest.mark.timeout(2400)])
        metafunc.parametrize("instants", [pytest.param(3, id="few"), storm])
    if "numbers" in metafunc.fixturenames:
        every = pytest.param(list(range(80)), id="every", marks=[pytest.mark.slow, pytest.mark.timeout(2400)])
        metafunc.parametrize("numbers", [pytest.param([10, 16], id="some"), every])


@pytest.mark.parametrize(
    "fault", [pytest.param(one, marks=[] if one in BRIEFLY else pytest.mark.slow) for one in FAULTS]
)
def test_faults_of_the_network_are_survived(processes: Processes, proxy: Proxy, tmp_path: Path, fault: Fault) -> None:
    """Every third request fails, at another place for each attempt."""
    chance = random.Random(fault)
    proxy.decide = lambda number, method, path: fault if chance.random() < 0.3 else "pass"
    url = f"{STORE}/{tmp_path.name}"
    assert mirror(processes, tmp_path / "machine", url, proxy.url, lease_seconds=5.0) == 0, output_of(
        tmp_path / "machine"
    )
    assert check(url, tmp_path / "empty") == LAST
    assert [one.step for one in RemoteCheckpoints(Bucket(url)).all()] == [LAST, LAST - 1]


def test_an_owner_that_slept_past_its_lease_writes_nothing_that_counts(proxy: Proxy, tmp_path: Path) -> None:
    url = f"{STORE}/{tmp_path.name}"
    sleeper = attach(place_of(url, tmp_path / "one"), Retention())
    sleeper.abandon()  # the lease is renewed by hand
    commit(sleeper, 1)
    sleeper.sync()
    with pytest.raises(RunExistsError, match="live process"):
        attach_while(url, tmp_path / "two", sleeper.lease.renew)
    heir = attach(place_of(url, tmp_path / "two"), Retention())  # nobody renews the lease now
    assert [path.name for path in heir.root.iterdir()] == ["checkpoint-1"]
    commit(sleeper, 2, "of the sleeper")
    with pytest.raises(LostLeaseError, match="taken over"):
        sleeper.sync()
    # even a manifest that was on its way does not count
    late = "checkpoints/checkpoint-2-e1-0badf00d"
    content = (sleeper.root / "checkpoint-2/manifest.json").read_bytes()
    sleeper.remote.upload(
        sleeper.root / "checkpoint-2", late, lambda source, name, paths: _put_all(sleeper, source, name, paths), int
    )
    assert sleeper.bucket.get(f"{late}/manifest.json") == (content, sleeper.bucket.get(f"{late}/manifest.json")[1])  # type: ignore[index]
    assert [one.step for one in heir.remote.valid(heir.lease.state)] == [1]
    commit(heir, 2)
    heir.sync()
    assert {one.epoch for one in heir.remote.all() if one.step == 2} == {2}
    verify(heir.remote.fetch(heir.remote.valid(heir.lease.state)[0], tmp_path / "empty"))
    assert heir.bucket.get("record.jsonl")[0] == b"1\n2\n"  # type: ignore[index]


def _put_all(mirror: Mirror, source: Path, name: str, paths: Any) -> None:
    for path in paths:
        mirror.bucket.upload(f"{name}/{path}", source / path)


def attach_while(url: str, machine: Path, renew: Any) -> Mirror:
    """Attach a machine while the owner lives."""
    import threading

    ended = threading.Event()

    def live() -> None:
        while not ended.wait(0.02):
            renew()

    thread = threading.Thread(target=live)
    thread.start()
    try:
        return attach(place_of(url, machine), Retention())
    finally:
        ended.set()
        thread.join()


def test_clocks_that_jump_change_nothing(proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jumps = random.Random(0)
    monkeypatch.setattr(time, "time", lambda: jumps.uniform(0, 4e9))
    url = f"{STORE}/{tmp_path.name}"
    owner = attach(place_of(url, tmp_path / "one"), Retention())
    owner.abandon()
    with pytest.raises(RunExistsError):
        attach_while(url, tmp_path / "two", owner.lease.renew)
    owner.lease.release()
    attach(place_of(url, tmp_path / "two"), Retention()).close()
