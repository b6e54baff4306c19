"""Trainings over S3: empty machines continue them, faults and kills change no bit, others may take them over."""

from __future__ import annotations

import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from onstep.mirror.remote_checkpoints import RemoteCheckpoints
from onstep.stores.bucket import Bucket
from onstep.stores.lease import Lease
from tests.support.faulty_proxy import FAULTS, Proxy
from tests.support.forked_processes import Processes, output_of
from tests.support.mirrored_runs import (
    MirroredRuns,
    check_no_secret,
    check_that_an_empty_machine_continues,
    committed,
    lease_of,
    outcome,
)
from tests.support.object_store import STORE
from tests.support.waiting import until

pytestmark = pytest.mark.process


@pytest.fixture
def runs(proxy: Proxy, processes: Processes, tmp_path: Path, corpus: Path, token_cache: Path) -> MirroredRuns:
    return MirroredRuns(processes, corpus, token_cache, f"{STORE}/{tmp_path.name}", proxy.url)


def test_an_empty_machine_continues_bit_for_bit(runs: MirroredRuns, tmp_path: Path) -> None:
    check_that_an_empty_machine_continues(runs, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_kills_and_faults_at_random_change_no_bit(runs: MirroredRuns, proxy: Proxy, tmp_path: Path) -> None:
    """Two machines, one of them emptied at times; a tenth of the requests fails, in whatever way."""
    assert runs.train(tmp_path / "whole", output_dir=f"{runs.url}/whole") == 0, output_of(tmp_path / "whole")
    chance, kills, starts = random.Random(36), 0, 0
    proxy.decide = lambda number, method, path: chance.choice(FAULTS) if chance.random() < 0.1 else "pass"
    url, is_done = f"{runs.url}/run", False
    while not is_done:
        machine = tmp_path / f"machine-{chance.randrange(2)}"
        if chance.random() < 0.3:
            shutil.rmtree(machine, ignore_errors=True)
        [child] = runs.start(machine, slow=0.2)
        starts += 1
        if starts <= 20:
            time.sleep(chance.uniform(0.5, 5.0))
            child.end()
        code = child.wait()
        kills += code == -9
        assert code in (0, -9, 1), output_of(machine)  # 1: the store refused at the start
        is_done = code == 0
    proxy.decide = lambda number, method, path: "pass"
    assert outcome(url, tmp_path / "b") == outcome(f"{runs.url}/whole/run", tmp_path / "a")
    check_no_secret(tmp_path, runs.url)
    print(f"{kills} kills in {starts} starts, {len(proxy.requests)} requests")


@pytest.mark.slow
def test_a_run_that_is_taken_over_ends_with_an_error(runs: MirroredRuns, tmp_path: Path) -> None:
    url = f"{runs.url}/run"
    [child] = runs.start(tmp_path / "machine", slow=0.5)
    remote = RemoteCheckpoints(Bucket(url))
    until(remote.all, lambda: output_of(tmp_path / "machine"), while_true=lambda: child.is_alive)
    heir, _ = Lease.take(Bucket(url), "heir", "an heir", seconds=60.0, own=[lease_of(url).owner])
    heir.settle(one.name for one in remote.all() if one.is_committed)
    assert child.wait() == 1
    assert "was taken over by an heir" in output_of(tmp_path / "machine")
    assert lease_of(url).owner == "heir"


@pytest.mark.slow
def test_a_process_that_sleeps_past_its_lease_ends_and_what_it_wrote_does_not_count(
    runs: MirroredRuns, tmp_path: Path
) -> None:
    """It is stopped at whatever it does; another machine takes the run over and finishes it."""
    whole = f"{runs.url}/whole"
    assert runs.train(tmp_path / "whole", output_dir=whole) == 0, output_of(tmp_path / "whole")
    chance, ended = random.Random(5), []
    for number in range(8):
        url, place = f"{runs.url}-{number}", tmp_path / str(number)
        [sleeper] = runs.start(place / "one", output_dir=url, slow=2.0)
        until(lambda url=url: committed(f"{url}/run"), lambda place=place: output_of(place / "one"))
        time.sleep(chance.uniform(0.0, 3.0))
        sleeper.send_signal(signal.SIGSTOP)
        [heir] = runs.start(place / "two", output_dir=url, slow=0.2)
        until(lambda place=place: "is done" in output_of(place / "two"), lambda place=place: output_of(place / "two"))
        sleeper.send_signal(signal.SIGCONT)
        ended.append(sleeper.wait())
        assert heir.wait() == 0, output_of(place / "two")
        assert "was taken over by" in output_of(place / "one")
        assert outcome(f"{url}/run", place / "b")["files"] == outcome(f"{whole}/run", place / "a")["files"]
    print(f"sleepers ended with {ended}")
    assert set(ended) == {1}


@pytest.mark.slow
def test_of_two_processes_that_want_a_run_one_has_it(runs: MirroredRuns, tmp_path: Path) -> None:
    """Ten times, on machines of their own: the other one is refused, and every checkpoint is of the one."""
    for number in range(10):
        url = f"{runs.url}-{number}"
        machines = [tmp_path / f"{number}-{one}" for one in range(2)]
        children = [runs.start(machine, output_dir=url, slow=0.1, lease_seconds=5.0)[0] for machine in machines]
        codes = [child.wait() for child in children]
        refused = [output_of(machine) for machine, code in zip(machines, codes, strict=True) if code == 1]
        assert sorted(codes) == [0, 1], codes
        assert "is in use by a live process" in refused[0]
        assert committed(f"{url}/run") == [11, 10]
        assert {one.epoch for one in RemoteCheckpoints(Bucket(f"{url}/run")).all()} == {lease_of(f"{url}/run").epoch}
