"""A second process under the id of a worker that lives is refused; one that follows a dead worker is not."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from onstep.callbacks import DiLoCoCallback
from onstep.diloco.client import RefusedByServerError
from onstep.diloco.client.membership import lives_here, this_process
from onstep.diloco.protocol.messages import Refused, Register, Registered, Settings, Submit
from onstep.diloco.protocol.operations import Answer, Send, Sleep
from onstep.diloco.protocol.session import WorkerSession
from onstep.diloco.server import DiLoCoServer
from onstep.diloco.worker import DiLoCoWorker
from tests.diloco.protocol.test_relay import run
from tests.diloco.worker.crew import small_model
from tests.support.forked_processes import Processes
from tests.support.waiting import until

JOBS = "tests.support.jobs.diloco_jobs"


def test_a_process_under_the_id_of_one_that_lives_is_refused(processes: Processes, tmp_path: Path) -> None:
    settings = Settings(num_workers=1, min_workers=1)
    with DiLoCoServer(small_model(), settings=settings, port=0, token="secret") as server:
        held = processes.start(JOBS, "hold", tmp_path, {"server": server.address, "id": "w"})[0]
        until((tmp_path / "holds").exists, while_true=lambda: held.is_alive)
        refused = f"'w' is process {held.pid} on .*, which is alive; give this one"
        with pytest.raises(RefusedByServerError, match=refused):
            DiLoCoWorker(small_model(), None, server.address, worker_id="w", auth_token="secret").start()
        callback = DiLoCoCallback(server.address, worker_id="w", auth_token="secret")
        with pytest.raises(RefusedByServerError, match=refused):
            callback.check_start()  # before anything is built
        held.send_signal(signal.SIGKILL)
        assert held.wait() == -9
        callback.check_start()
        with DiLoCoWorker(small_model(), None, server.address, worker_id="w", auth_token="secret") as worker:
            assert worker.is_active


def test_processes_of_this_machine_are_known_by_their_id() -> None:
    mine = this_process()
    assert lives_here(mine) is False, "its own session is replaced"
    assert lives_here({**mine, "pid": 1}) is True
    assert lives_here({**mine, "pid": 2**22 + 1}) is False
    assert lives_here({**mine, "machine": "elsewhere"}) is None
    assert lives_here({}) is False


@pytest.mark.parametrize("speaks", [True, False])
def test_a_process_of_another_machine_is_replaced_once_it_is_silent(speaks: bool) -> None:
    """It is refused as soon as the other one sends anything; else it waits for half of the heartbeat timeout."""
    coordinator, now = run(), 0.0
    there = {"machine": "there", "pid": 7, "started_at": 0.0}
    assert isinstance(coordinator.handle(Register("w", "old", "model", details=there), now), Registered)
    session = WorkerSession("w", "new", "model", clock=lambda: now, lives=lambda incumbent: None)
    joining = session.join(600.0)
    outcome: Answer | None = None

    def drive() -> None:
        nonlocal now, outcome
        while True:
            effect = joining.send(outcome)
            outcome = None
            if isinstance(effect, Sleep):
                now += effect.seconds
                if speaks and now > 10:
                    coordinator.preview(_submission(), now)
            else:
                assert isinstance(effect, Send)
                outcome = Answer(coordinator.handle(effect.request, now))

    if speaks:
        with pytest.raises(RefusedByServerError, match="process 7 on there"):
            drive()
        assert now < 20
        return
    with pytest.raises(StopIteration):
        drive()
    assert 60 <= now < 65
    assert isinstance(coordinator.preview(_submission(), now), Refused)


def _submission() -> Submit:

    return Submit("w", "old", 0, 0, 0, 1, 1)
