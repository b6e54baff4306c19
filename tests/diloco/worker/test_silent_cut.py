"""A line that swallows packets: a worker trains on, and all that it learned counts when the line is back."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch

from onstep.diloco.client import patience
from onstep.diloco.client.patience import Patience
from onstep.diloco.protocol import session
from onstep.diloco.protocol.messages import Settings
from onstep.diloco.server import DiLoCoServer
from onstep.diloco.worker import DiLoCoWorker
from tests.diloco.worker.crew import assert_close, batches, sgd, small_model, train, trained_alone, values
from tests.support.diloco.silent_line import SilentLine

SETTINGS = Settings(sync_every=2, codec="fp32", heartbeat_timeout=0.0)


@pytest.fixture
def server() -> Iterator[DiLoCoServer]:
    with DiLoCoServer(small_model(), settings=SETTINGS, port=0, outer_optimizer_factory=sgd) as server:
        yield server


@pytest.fixture
def line(server: DiLoCoServer) -> Iterator[SilentLine]:
    with closing(SilentLine(server.port)) as line:
        yield line


def test_a_worker_trains_on_while_the_line_swallows_its_packets_and_its_work_counts_later(
    server: DiLoCoServer, line: SilentLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "LEAST_SECONDS", 0.3)
    monkeypatch.setattr(session, "LEAST_POLL_SECONDS", 0.1)
    model, data = small_model(seed=9), batches(0, 20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"heartbeat_interval": 0.0, "max_sync_retries": 0, "auth_token": server.token}
    with DiLoCoWorker(model, optimizer, line.address, **options) as worker:
        train(model, optimizer, data[:4])
        line.is_cut = True
        end_of_cut = threading.Timer(100.0, setattr, (line, "is_cut", False))
        end_of_cut.start()
        train(model, optimizer, data[4:15])
        assert line.is_cut, "the worker waited for the end of the cut"
        end_of_cut.cancel()
        assert server.sync_round == 2
        line.is_cut = False
        train(model, optimizer, data[15:])
        worker.force_sync()
    assert_close(values(model), trained_alone(20), 1e-9)
    assert_close(server.get_global_params(), trained_alone(20), 1e-9)


def test_the_limit_of_a_request_follows_the_answers_so_far() -> None:
    limits = Patience(60.0)
    assert limits.limit(20.0) == 40.0
    limits.note(0.1)
    assert (limits.limit(), limits.limit(20.0), limits.limit(0.0, 2_000_000_000)) == (5.0, 25.0, 15.0)
    limits.note(3.0)
    assert limits.limit() == 12.0
    for _ in range(10):
        limits.note(0.1)
    assert limits.limit() == 5.0
    limits.note(100.0)
    assert limits.limit() == 60.0


@pytest.mark.slow
def test_a_cut_of_forty_seconds_blocks_a_worker_no_longer_than_a_reset(server: DiLoCoServer, line: SilentLine) -> None:
    model = small_model(seed=9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    blocked = []
    with DiLoCoWorker(model, optimizer, line.address, auth_token=server.token) as worker:
        train(model, optimizer, batches(0, 6))
        line.is_cut, until = True, time.monotonic() + 40.0
        while time.monotonic() < until:
            started = time.monotonic()
            train(model, optimizer, batches(0, 1))
            blocked.append(time.monotonic() - started)
            time.sleep(0.1)
        line.is_cut = False
        worker.force_sync()
    print(f"blocked for {sum(blocked):.1f} of 40 s, at most {max(blocked):.1f} s at once; {len(blocked)} steps")
    assert len(blocked) > 100
