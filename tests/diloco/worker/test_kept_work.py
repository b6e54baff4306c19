"""A worker that ends while the server is away keeps its work on disk, and its next start submits it."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from onstep.diloco.client import DiLoCoClient
from onstep.diloco.protocol.messages import Reply, Request, Settings, Submit
from onstep.diloco.server import DiLoCoServer
from onstep.diloco.worker import DiLoCoWorker
from onstep.diloco.worker.kept_work import WorkKept
from onstep.errors import CheckpointError
from tests.diloco.worker.crew import (
    ALONE,
    assert_close,
    batches,
    local_worker,
    new_worker,
    saved,
    sgd,
    small_model,
    train,
    trained_alone,
    values,
)
from tests.diloco.worker.local_server import LocalServer


def ended_without_the_server(settings: Settings, steps: int) -> tuple[LocalServer, dict[str, Any]]:
    """A server that was away from a worker's third step on, until the worker ended; and a state of the worker."""
    server, model, optimizer, worker = local_worker(settings, timeout=600)
    states = []

    def end() -> None:
        with worker:
            train(model, optimizer, batches(0, steps)[:2])
            server.is_down = True
            train(model, optimizer, batches(0, steps)[2:])
            states.append(saved(worker))

    ends_with_kept_work(end)
    assert_close(values(model), trained_alone(steps))
    server.is_down = False
    return server, states[0]


def ends_with_kept_work(end: Callable[[], None]) -> None:
    with pytest.raises(WorkKept, match="steps of this worker are in no round: they are kept in") as ended:
        end()
    assert ended.value.code == 75


def test_the_next_start_says_what_it_submits_and_each_round_has_its_own_loss(
    kept_work: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server, model, optimizer, worker = local_worker(timeout=600)
    worker = DiLoCoWorker(model, None, "", worker_id="w", client=server, heartbeat_interval=0.0, max_sync_retries=0)

    def end() -> None:
        with worker:
            for number, batch in enumerate(batches(0, 5)):
                server.is_down = number >= 2
                train(model, optimizer, [batch])
                worker.end_step(1.0, loss=float(number))

    ends_with_kept_work(end)
    (file,) = kept_work.iterdir()
    os.utime(file, (86400.0, 86400.0))
    server.is_down = False
    caplog.set_level(logging.INFO, "onstep.diloco")
    with new_worker(server)[2]:
        pass
    kept_at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(86400.0))
    assert f"3 steps of the last session, kept since {kept_at}, are submitted now" in caplog.text
    assert [(one.steps, one.loss) for one in server.submits] == [(2, 0.5), (2, 2.5), (1, 4.0)]
    assert server.coordinator.counts["steps"] == 5
    assert not server.coordinator.losses.steps


@pytest.mark.parametrize("num_fragments", [1, 2])
@pytest.mark.parametrize("steps", [3, 4, 9])
def test_the_next_start_submits_it_once(steps: int, num_fragments: int, kept_work: Path) -> None:
    server, state = ended_without_the_server(replace(ALONE, num_fragments=num_fragments, blend=1.0), steps)
    assert len(list(kept_work.iterdir())) == 1
    model, _, worker = new_worker(server)
    worker.load_state_dict(state)  # it has these steps, too
    with worker:
        assert_close(values(model), trained_alone(steps))
    assert list(kept_work.iterdir()) == []
    assert_close(server.parameters(), trained_alone(steps))
    counted = {(one.fragment, one.sequence): one.steps for one in server.submits}
    assert sum(counted.values()) == steps * num_fragments


def test_what_the_server_had_got_is_not_counted_again(kept_work: Path) -> None:
    server, model, optimizer, worker = local_worker()
    send = server.send

    def lose_all_answers(request: Request, body: bytes = b"") -> tuple[Reply, Any]:
        reply, answer = send(request, body)
        if isinstance(request, Submit):
            server.is_down = True
        return reply, answer

    def end() -> None:
        with worker:
            server.send = lose_all_answers  # type: ignore[method-assign]
            train(model, optimizer, batches(0, 2))

    ends_with_kept_work(end)
    server.send, server.is_down = send, False  # type: ignore[method-assign]
    with new_worker(server)[2]:
        assert_close(server.parameters(), trained_alone(2))
    assert server.coordinator.counts["contributions"] == 1
    assert list(kept_work.iterdir()) == []


def test_work_that_is_too_old_by_then_is_lost_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    server, _ = ended_without_the_server(ALONE, 3)
    other, optimizer, other_worker = new_worker(server, "other")
    with other_worker:
        train(other, optimizer, batches(1, 4))
    with new_worker(server)[2]:
        assert_close(server.parameters(), values(other))
    assert "1 steps of the last session are lost: 2 versions late, max_staleness is 1" in caplog.text
    assert server.coordinator.losses.steps == {"too old": 1}


def test_a_damaged_file_and_one_of_another_run_are_named(kept_work: Path, caplog: pytest.LogCaptureFixture) -> None:
    server, _ = ended_without_the_server(ALONE, 3)
    (file,) = kept_work.iterdir()
    server.coordinator.run_id = "another"
    caplog.set_level(logging.ERROR)
    with new_worker(server)[2]:
        assert f"the steps in {file} are of run run, not of this one" in caplog.text
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="is damaged; remove it"):
        new_worker(server)[2].start()


def test_it_is_so_over_sockets_with_a_server_that_is_started_again(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"settings": ALONE, "outer_optimizer_factory": sgd, "token": "s"}
    server = DiLoCoServer(small_model(), output_dir=tmp_path / "server", port=0, **arguments)
    server.start()
    client = DiLoCoClient(server.address, token="s")
    model, optimizer, worker = new_worker(client)  # type: ignore[arg-type]

    def end() -> None:
        with worker:
            train(model, optimizer, batches(0, 5)[:2])
            server.stop()
            train(model, optimizer, batches(0, 5)[2:])

    ends_with_kept_work(end)
    again = DiLoCoServer(output_dir=tmp_path / "server", port=server.port, **arguments)
    with again, new_worker(DiLoCoClient(server.address, token="s"))[2]:  # type: ignore[arg-type]
        assert_close(again.get_global_params(), trained_alone(5))
