"""A worker that nobody stops, because its training failed, does not pretend to train."""

from __future__ import annotations

import gc
import threading
import time
from dataclasses import replace
from typing import Any

from onstep.diloco.client.membership import Membership
from onstep.diloco.codec.specs import specs_of
from onstep.diloco.protocol.messages import Heartbeat, Reply, Request
from onstep.diloco.worker.heartbeat import HeartbeatThread
from onstep.diloco.worker.pace import Pace
from tests.diloco.worker.crew import ALONE, batches, new_worker, small_model, train, values
from tests.diloco.worker.local_server import LocalServer
from tests.support.waiting import until


def served() -> LocalServer:
    return LocalServer(values(small_model()), replace(ALONE, heartbeat_timeout=60.0))


def test_a_worker_that_is_gone_leaves_the_run() -> None:
    server = served()
    model, optimizer, worker = new_worker(server, heartbeat_interval=0.01)
    worker.start()
    train(model, optimizer, batches(0, 1))
    del worker, model, optimizer
    gc.collect()
    until(lambda: server.coordinator.counts["departures"] == 1)
    until(lambda: "diloco-heartbeat" not in [one.name for one in threading.enumerate()])


def test_a_worker_whose_thread_has_ended_is_evicted() -> None:
    server = LocalServer(values(small_model()), replace(ALONE, heartbeat_timeout=1.0))
    _, _, worker = new_worker(server, heartbeat_interval=0.01)
    thread = threading.Thread(target=worker.start)
    thread.start()
    thread.join()

    def is_evicted() -> bool:
        server.coordinator.tick(time.monotonic())
        return server.coordinator.counts["deaths"] == 1

    until(is_evicted)
    worker.stop(merge=False)


class CountingServer(LocalServer):
    num_beats = 0

    def send(self, request: Request, body: bytes = b"") -> tuple[Reply, Any]:
        self.num_beats += isinstance(request, Heartbeat)
        return super().send(request, body)


def test_a_worker_beats_often_enough_for_a_server_with_a_short_timeout() -> None:
    server = CountingServer(values(small_model()), replace(ALONE, heartbeat_timeout=0.3))
    with new_worker(server, heartbeat_interval=30.0)[2]:
        until(lambda: server.num_beats >= 2)


def test_a_server_that_evicts_earlier_after_a_restart_gets_heartbeats_more_often() -> None:
    server = CountingServer(values(small_model()), replace(ALONE, heartbeat_timeout=300.0))
    model, optimizer, worker = new_worker(server, heartbeat_interval=90.0)
    with worker:
        server.coordinator.settings = replace(server.coordinator.settings, heartbeat_timeout=0.3)
        server.coordinator.evict(worker.worker_id, time.monotonic())
        train(model, optimizer, batches(0, 2))  # registers again with the submission
        until(lambda: server.num_beats >= 2)


class AskedPace(Pace):
    num_asked = 0

    def seconds_since_step(self) -> float:
        self.num_asked += 1
        return super().seconds_since_step()


def test_a_worker_that_takes_no_step_is_silent_until_the_next() -> None:
    server = CountingServer(values(small_model()), ALONE)
    now = 0.0
    pace = AskedPace(clock=lambda: now)
    member = Membership(server, "w", specs_of(values(small_model())), timeout=1.0, lost_seconds=1.0)
    member.join()
    thread = HeartbeatThread(member, 0.005, pace, idle_seconds=10.0)

    def ask(count: int) -> int:
        asked = pace.num_asked
        until(lambda: pace.num_asked >= asked + count)
        return server.num_beats

    try:
        assert ask(3) > 0
        now = 11.0
        silent = ask(2)
        assert ask(5) == silent
        pace.count_step()
        assert ask(3) > silent
    finally:
        thread.stop()
