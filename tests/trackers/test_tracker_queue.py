"""Nothing a tracker does reaches the training: no wait, no exception, one warning."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onstep.trackers import Point, TrackerQueue
from onstep.trackers.delivery import CircuitBreaker
from tests.support.hostile_trackers import Hanging, Raising, Remembering, identity


@pytest.fixture
def hanging() -> Iterator[list[Hanging]]:
    """Trackers that are let go at the end, so that no thread stays."""
    made: list[Hanging] = []
    yield made
    for tracker in made:
        tracker.released.set()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def opened(tracker: Any, directory: Path, **options: Any) -> TrackerQueue:
    queue = TrackerQueue(tracker, **options)
    queue.open(identity(directory), {})
    return queue


class OnDevice:
    """A number that tells which thread reads it, as a tensor on a device would make it wait."""

    def __init__(self, value: float) -> None:
        self.value = value
        self.read_by: int | None = None

    def __float__(self) -> float:
        self.read_by = threading.get_ident()
        return self.value


def test_a_tracker_gets_everything_in_order_in_one_other_thread(tmp_path: Path) -> None:
    tracker = Remembering()
    queue = opened(tracker, tmp_path)
    for step in range(50):
        queue.log({"loss": step / 2}, step, 100.0 + step)
    queue.text("samples", "Once upon", 50)
    queue.close("stopped")
    logged = [("log", {"loss": step / 2}, step, 100.0 + step) for step in range(50)]
    assert tracker.calls == [
        ("open", identity(tmp_path), {}),
        *logged,
        ("text", "samples", "Once upon", 50),
        ("close", "stopped"),
    ]
    assert len(tracker.threads) == 1
    assert threading.get_ident() not in tracker.threads
    assert queue.dropped == 0


def test_values_on_a_device_are_read_by_the_trackers_thread(tmp_path: Path) -> None:
    tracker, value = Remembering(), OnDevice(0.5)
    queue = opened(tracker, tmp_path)
    queue.log({"loss": value, "note": "text", "step_time": 2}, 1, 0.0)
    queue.close("completed")
    assert tracker.calls[1] == ("log", {"loss": 0.5, "step_time": 2}, 1, 0.0)
    assert value.read_by in tracker.threads


def test_the_metrics_may_be_changed_after_they_were_handed_over(tmp_path: Path, hanging: list[Hanging]) -> None:
    tracker = Hanging("open")
    hanging.append(tracker)
    queue, metrics = opened(tracker, tmp_path), {"loss": 1.0}
    queue.log(metrics, 1, 0.0)
    metrics["loss"] = 2.0
    tracker.released.set()
    queue.close("completed")
    assert tracker.calls[1] == ("log", {"loss": 1.0}, 1, 0.0)


def test_a_tracker_that_raises_costs_one_warning_and_what_it_did_not_take_is_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = Raising("log", "text", "close")
    queue = opened(tracker, tmp_path)
    for step in range(3):
        queue.log({"loss": 1.0}, step, 0.0)
    queue.text("samples", "Once", 3)
    queue.close("completed")
    assert queue.dropped == 4
    [warning] = warnings(caplog)
    assert "'remembering' failed with OSError: no route to host" in warning
    assert f"onstep.trackers.replay({str(tmp_path / 'trainer_logs.json')!r}, tracker)" in warning


def test_the_remedy_is_the_trackers_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    known = Raising("log")
    known.name = "wandb"
    for queue in (opened(known, tmp_path), opened(Raising("log"), tmp_path, remedy="Nothing can be done.")):
        queue.log({"loss": 1.0}, 1, 0.0)
        queue.close("completed")
    first, second = warnings(caplog)
    assert first.endswith(f"to fill the tracker afterwards: onstep logs replay {tmp_path} --to wandb")
    assert second.endswith("training continues. Nothing can be done.")


def test_until_a_tracker_is_open_the_points_of_the_process_before_wait_too(
    tmp_path: Path, hanging: list[Hanging]
) -> None:
    """Both where the tracker is to write them itself and where the queue hands them over."""
    last = tuple(Point({"loss": 1.0}, step, 1000.0) for step in range(1, 9))
    for takes_back in (True, False):
        tracker = Hanging("open")
        tracker.takes_back = takes_back
        hanging.append(tracker)
        queue = TrackerQueue(tracker, capacity=5)
        queue.open(identity(tmp_path, start_step=8, last_points=last), {})
        queue.log({"loss": 1.0}, 9, 0.0)
        assert queue.num_waiting == 9
        tracker.released.set()
        queue.close("completed")
        assert queue.dropped == 0
        assert tracker.steps == ([9] if takes_back else list(range(1, 10)))


def test_a_tracker_that_cannot_be_opened_keeps_its_claim_to_what_it_would_write_itself(tmp_path: Path) -> None:
    tracker = Raising("open")
    tracker.takes_back = True
    queue = TrackerQueue(tracker)
    queue.open(identity(tmp_path, start_step=3, last_points=(Point({"loss": 1.0}, 3, 0.0),)), {})
    queue.log({"loss": 1.0}, 4, 0.0)
    while queue.dropped == 0:
        pass
    assert queue._session is not None
    queue._session.deliveries._clock = lambda: time.monotonic() + 60.0
    assert queue.num_waiting == 2
    tracker.where.clear()
    queue.log({"loss": 1.0}, 5, 0.0)
    while 5 not in tracker.steps:
        pass
    queue.close("completed")


def test_numbers_reach_a_tracker_in_pythons_own_types(tmp_path: Path) -> None:
    tracker = Remembering()
    queue = opened(tracker, tmp_path)
    queue.log({"loss": np.float64(0.25)}, 1, 0.0)
    queue.close("completed")
    assert type(tracker.calls[1][1]["loss"]) is float


def test_a_tracker_that_recovers_gets_what_comes_after(tmp_path: Path) -> None:
    tracker = Raising("log")
    queue = opened(tracker, tmp_path)
    queue.log({"loss": 1.0}, 1, 0.0)
    queue.text("marker", "", 1)
    while "text" not in tracker.names:
        pass
    tracker.where.clear()
    queue.log({"loss": 1.0}, 2, 0.0)
    queue.close("completed")
    assert queue.dropped == 1
    assert tracker.steps == [1, 2]


def test_what_does_not_fit_into_the_queue_is_dropped_without_waiting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, hanging: list[Hanging]
) -> None:
    tracker = Hanging("log")
    hanging.append(tracker)
    queue = opened(tracker, tmp_path, capacity=5)
    queue.log({"loss": 1.0}, 0, 0.0)
    assert tracker.reached.wait(10)
    for step in range(1, 101):
        queue.log({"loss": 1.0}, step, 0.0)
    assert queue.dropped == 95
    assert "slower than the run (5 points are queued)" in warnings(caplog)[0]
    tracker.released.set()
    queue.close("completed")
    assert tracker.steps == [0, 1, 2, 3, 4, 5]
    assert len(warnings(caplog)) == 1


@pytest.mark.parametrize("where", ["open", "log", "close"])
def test_close_leaves_a_tracker_behind_that_hangs(
    where: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, hanging: list[Hanging]
) -> None:
    tracker = Hanging(where)
    hanging.append(tracker)
    queue = opened(tracker, tmp_path, close_timeout=0.05)
    queue.log({"loss": 1.0}, 1, 0.0)
    queue.log({"loss": 1.0}, 2, 0.0)
    queue.close("completed")
    assert "did not finish within 0.05 s and was abandoned" in warnings(caplog)[0]
    assert queue.dropped == {"open": 2, "log": 1, "close": 0}[where]
    assert not queue.is_open


def test_a_tracker_that_was_left_behind_is_never_used_by_two_threads(tmp_path: Path, hanging: list[Hanging]) -> None:
    tracker = Hanging("close")
    hanging.append(tracker)
    queue = opened(tracker, tmp_path, close_timeout=0.05)
    queue.close("completed")
    queue.open(identity(tmp_path), {})
    queue.log({"loss": 1.0}, 7, 0.0)
    queue.close("completed")
    assert tracker.names == ["open", "close"]
    tracker.released.set()
    while len(tracker.names) < 4:
        pass
    assert tracker.names == ["open", "close", "open", "close"], "the point was given up with its session"


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_a_tracker_that_ends_its_thread_costs_one_warning(
    error: BaseException, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = Raising("log", error=error)
    queue = opened(tracker, tmp_path)
    for step in range(3):
        queue.log({"loss": 1.0}, step, 0.0)
    queue.close("completed")
    assert queue.dropped == 3
    assert len(warnings(caplog)) == 1
    assert tracker.names[-1] == "close"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_is_killed_costs_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracker = Remembering()
    tracker.name = "killed"
    queue = opened(tracker, tmp_path)
    [thread] = [one for one in threading.enumerate() if one.name == "tracker-killed"]
    assert thread.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
    queue.log({"loss": 1.0}, 1, 0.0)  # wakes the thread, which meets its end
    thread.join()
    queue.log({"loss": 1.0}, 2, 0.0)
    queue.log({"loss": 1.0}, 3, 0.0)
    assert queue.is_broken
    assert queue.dropped == 2
    queue.close("completed")
    assert len(warnings(caplog)) == 1


def test_a_tracker_that_keeps_failing_is_left_alone_and_tried_again_later(tmp_path: Path) -> None:
    now = [0.0]
    tracker = Raising("log")
    queue = opened(tracker, tmp_path, breaker=CircuitBreaker(3, retry_seconds=60.0, clock=lambda: now[0]))

    def log_and_wait(step: int) -> None:
        before = queue.dropped + len(tracker.steps)
        queue.log({"loss": 1.0}, step, 0.0)
        while queue.dropped + len(tracker.steps) == before:
            pass

    for step in range(10):
        log_and_wait(step)
    while queue.dropped < 10:
        pass
    assert tracker.steps == [0, 1, 2]
    assert queue.is_broken
    tracker.where.clear()
    now[0] = 61.0
    log_and_wait(10)
    queue.log({"loss": 1.0}, 11, 0.0)
    queue.close("completed")
    assert tracker.steps == [0, 1, 2, 10, 11]
    assert not queue.is_broken
    assert queue.dropped == 10


def test_a_tracker_that_cannot_be_opened_is_opened_for_a_later_point(tmp_path: Path) -> None:
    tracker = Raising("open")
    queue = opened(tracker, tmp_path)
    while tracker.names != ["open"]:
        pass
    tracker.where.clear()
    queue.log({"loss": 1.0}, 1, 0.0)
    queue.close("completed")
    assert tracker.names == ["open", "open", "log", "close"]


def test_a_tracker_that_was_never_open_is_not_closed(tmp_path: Path) -> None:
    tracker = Raising("open")
    queue = opened(tracker, tmp_path)
    queue.log({"loss": 1.0}, 1, 0.0)
    queue.close("completed")
    assert set(tracker.names) == {"open"}
    assert queue.dropped == 1


def test_closing_twice_and_logging_before_opening_are_harmless(tmp_path: Path) -> None:
    queue = TrackerQueue(Remembering())
    queue.log({"loss": 1.0}, 1, 0.0)
    assert queue.dropped == 1
    queue.close("completed")
    queue.open(identity(tmp_path), {})
    queue.close("completed")
    queue.close("failed")
    assert queue.tracker.names == ["open", "close"]  # type: ignore[attr-defined]
    assert queue.dropped == 0


def test_opening_again_continues_behind_what_waits(tmp_path: Path) -> None:
    tracker = Remembering()
    queue = opened(tracker, tmp_path)
    queue.log({"loss": 1.0}, 1, 0.0)
    queue.open(identity(tmp_path, start_step=1), {"id": "x"})
    queue.log({"loss": 1.0}, 2, 0.0)
    queue.close("completed")
    assert [call[0] if call[0] != "close" else call for call in tracker.calls] == [
        "open",
        "log",
        ("close", "preempted"),
        "open",
        "log",
        ("close", "completed"),
    ]
    assert tracker.calls[3] == ("open", identity(tmp_path, start_step=1), {"id": "x"})


def test_the_state_is_the_checkpoints_until_the_tracker_has_its_own(tmp_path: Path, hanging: list[Hanging]) -> None:
    tracker = Hanging("open")
    hanging.append(tracker)
    queue = TrackerQueue(tracker)
    queue.open(identity(tmp_path), {"id": "saved"})
    assert queue.state_dict() == {"id": "saved"}
    tracker.released.set()
    queue.close("completed")
    assert queue.state_dict() == {"calls": 2}


def test_a_state_that_is_not_plain_never_reaches_a_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Strange(Remembering):
        def state_dict(self) -> dict[str, Any]:
            return {"run": self}

    tracker = Strange()
    queue = TrackerQueue(tracker)
    queue.open(identity(tmp_path), {"id": "saved"})
    for step in range(20):
        queue.log({"loss": 1.0}, step, 0.0)
    queue.close("completed")
    assert queue.state_dict() == {"id": "saved"}
    assert tracker.steps == list(range(20))
    assert (queue.dropped, queue.is_broken) == (0, False)
    [warning] = warnings(caplog)
    assert "The state of the tracker 'remembering' cannot be saved in a checkpoint (TypeError: " in warning


def test_a_forked_child_delivers_nothing_and_does_not_hang(tmp_path: Path) -> None:
    tracker = Remembering()
    queue = opened(tracker, tmp_path)
    child = os.fork()
    if child == 0:  # as a data loader's worker
        queue.log({"loss": 1.0}, 99, 0.0)
        queue.close("completed")
        os._exit(queue.dropped)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    queue.log({"loss": 1.0}, 1, 0.0)
    queue.close("completed")
    assert tracker.steps == [1]


def test_the_process_ends_although_a_tracker_hangs(tmp_path: Path) -> None:
    script = """
import sys, threading
from pathlib import Path
from onstep.trackers import Point, TrackerQueue
from tests.support.hostile_trackers import Hanging, identity
queue = TrackerQueue(Hanging("log"), close_timeout=0.1)
queue.open(identity(Path(sys.argv[1])), {})
queue.log({"loss": 1.0}, 1, 0.0)
queue.close("completed")
assert "torch" not in sys.modules
"""
    command = [sys.executable, "-c", script, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr.count("was abandoned")) == (0, 1), ended.stderr
