"""Nothing a tracker does reaches the training, and no point is lost: a tracker that fails is behind."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onstep.trackers import (
    CannotContinueError,
    TrackerFeed,
    can_complete,
    complete,
    make_tracker,
    recorded_options,
)
from onstep.trackers.breaker import CircuitBreaker
from onstep.trackers.lines import Line, MemoryLines, RecordLines
from onstep.trackers.tracker_logger import TrackerLogger
from tests.support.hostile_trackers import Hanging, Raising, Remembering, identity
from tests.support.tracker_files import scalars, table
from tests.support.waiting import PATIENCE


class Kept(Remembering):
    """A service that has what it is sent at once."""

    settling_seconds = 0.0

    def __init__(self, points: list[tuple[int, float]] | None = None) -> None:
        super().__init__()
        self.points = [] if points is None else points

    def log(self, metrics: Any, step: int, timestamp: float) -> None:
        super().log(metrics, step, timestamp)
        self.points += [(step, value) for name, value in metrics.items() if name == "train/loss"]


@pytest.fixture
def hanging() -> Iterator[list[Hanging]]:
    """Trackers that are let go at the end, so that no thread stays."""
    made: list[Hanging] = []
    yield made
    for tracker in made:
        tracker.released.set()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def opened(tracker: Any, directory: Path, **options: Any) -> tuple[TrackerFeed, MemoryLines]:
    feed, lines = TrackerFeed(tracker, **options), MemoryLines()
    feed.open(identity(directory), lines, None)
    return feed, lines


def add(lines: MemoryLines, feed: TrackerFeed, step: int, value: float = 1.0) -> None:
    lines.append({"timestamp": 100.0 + step, "loss": value}, step)
    feed.wake()


def close(feed: TrackerFeed, status: str = "completed", timeout: float = 30.0) -> None:
    feed.begin_close(status)
    feed.finish_close(timeout)


def test_a_tracker_gets_everything_in_order_in_one_other_thread(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = Remembering()
    feed, lines = opened(tracker, tmp_path)
    for step in range(50):
        add(lines, feed, step, step / 2)
    lines.append({"kind": "tracker", "to": "remembering", "tag": "samples", "text": "Once upon"}, 50)
    lines.append({"kind": "tracker", "to": "another", "tag": "samples", "text": "Once upon"}, 50)
    close(feed, "stopped")
    logged = [("log", {"train/loss": step / 2}, step, 100.0 + step) for step in range(50)]
    text = ("text", "samples", "Once upon", 50)
    assert tracker.calls == [("open", identity(tmp_path), {}), *logged, text, ("close", "stopped")]
    assert len(tracker.threads) == 1
    assert threading.get_ident() not in tracker.threads
    assert warnings(caplog) == []


@pytest.mark.parametrize("error", [OSError("no route to host"), SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_a_tracker_that_raises_costs_one_warning_and_gets_all_once_it_works(
    error: BaseException, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    tracker = Raising("log", error=error)
    feed, lines = opened(tracker, tmp_path, breaker=CircuitBreaker(3, retry_seconds=60.0, clock=lambda: now[0]))
    for step in range(10):
        add(lines, feed, step)
    while not feed.is_broken:
        pass
    assert tracker.steps in ([0] * 3, [0] * 4, [0, 0, 0, 0, 1]), "once more, then the next: it alone may be refused"
    tracker.where.clear()
    tracker.calls.clear()
    now[0] = 61.0
    add(lines, feed, 10)
    close(feed)
    assert tracker.steps == list(range(11))
    assert not feed.is_broken
    [warning] = warnings(caplog)
    assert f"'remembering' failed with {type(error).__name__}" in warning


def test_a_line_that_a_tracker_alone_refuses_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Picky(Remembering):
        def log(self, metrics: Any, step: int, timestamp: float) -> None:
            if step == 2:
                raise ValueError("not this one")
            super().log(metrics, step, timestamp)

    tracker = Picky()
    feed, lines = opened(tracker, tmp_path)
    for step in range(1, 6):
        add(lines, feed, step)
    close(feed)
    assert tracker.steps == [1, 3, 4, 5]
    assert "refuses a line of step 2, which it will lack" in warnings(caplog)[1]


def test_a_tracker_that_cannot_be_opened_is_opened_later(tmp_path: Path) -> None:
    tracker = Raising("open")
    feed, lines = opened(tracker, tmp_path, breaker=CircuitBreaker(1, retry_seconds=0.0))
    while tracker.names[:1] != ["open"]:
        pass
    tracker.where.clear()
    add(lines, feed, 1)
    close(feed)
    assert tracker.names[-3:] == ["open", "log", "close"]


@pytest.mark.parametrize("where", ["open", "log", "close"])
def test_close_leaves_a_tracker_behind_that_hangs(
    where: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, hanging: list[Hanging]
) -> None:
    tracker = Hanging(where)
    hanging.append(tracker)
    feed, lines = opened(tracker, tmp_path)
    add(lines, feed, 1)
    close(feed, timeout=0.05)
    assert "did not finish within 0.05 s and is behind" in warnings(caplog)[0]
    assert not feed.is_open


def test_a_tracker_that_was_left_behind_is_never_used_by_two_threads(tmp_path: Path, hanging: list[Hanging]) -> None:
    tracker = Hanging("close")
    hanging.append(tracker)
    feed, _ = opened(tracker, tmp_path)
    close(feed, timeout=0.05)
    feed.open(identity(tmp_path), MemoryLines(), None)
    close(feed, timeout=0.05)
    assert tracker.names == ["open", "close"]


def test_a_forked_child_sends_nothing_and_does_not_hang(tmp_path: Path) -> None:
    tracker = Remembering()
    feed, lines = opened(tracker, tmp_path)
    child = os.fork()
    if child == 0:  # as a data loader's worker
        add(lines, feed, 99)
        close(feed)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    add(lines, feed, 1)
    close(feed)
    assert tracker.steps == [1]


def test_the_process_ends_although_a_tracker_hangs(tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
from onstep.trackers import TrackerFeed
from onstep.trackers.lines import MemoryLines
from tests.support.hostile_trackers import Hanging, identity
feed, lines = TrackerFeed(Hanging("log")), MemoryLines([{"loss": 1.0, "global_step": 1}])
feed.open(identity(Path(sys.argv[1])), lines, None)
feed.begin_close("completed")
feed.finish_close(0.1)
assert "torch" not in sys.modules
"""
    command = [sys.executable, "-c", script, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (ended.returncode, ended.stderr.count("is behind")) == (0, 1), ended.stderr


# From a record


class Run:
    """A record, and the trackers that read it in one process after the other."""

    def __init__(self, directory: Path) -> None:
        self.path, self.directory = directory / "record.jsonl", directory
        self.clock = 0.0

    def write(self, steps: range, factor: float = 1.0, checkpoint: int | None = None) -> None:
        with self.path.open("a") as file:
            for step in steps:
                self.clock += 1.0
                line = {"timestamp": self.clock, "global_step": step, "kind": "log", "loss": factor * step}
                file.write(json.dumps(line) + "\n")
                if step == checkpoint:
                    file.write(json.dumps({"timestamp": self.clock, "global_step": step, "kind": "checkpoint"}) + "\n")

    def cut(self, step: int) -> None:
        """As a resume at a checkpoint, or a rollback to it."""
        lines = self.path.read_text().splitlines(keepends=True)
        self.path.write_text("".join(line for line in lines if json.loads(line)["global_step"] <= step))

    def feed(self, tracker: Any, **options: Any) -> TrackerFeed:
        feed = TrackerFeed(tracker, **options)
        file = self.directory / "trackers" / f"{tracker.name}.json"
        feed.open(identity(self.directory), RecordLines(self.path), file)
        return feed


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_a_tracker_that_was_down_gets_what_it_lacks_at_the_next_start(run: Run) -> None:
    points: list[tuple[int, float]] = []
    run.write(range(1, 4))
    close(run.feed(Kept(points)))
    down = Raising("open")
    run.write(range(4, 7))
    close(run.feed(down))
    run.write(range(7, 10))
    close(run.feed(Kept(points)))
    assert points == [(step, float(step)) for step in range(1, 10)]


def test_a_hanging_tracker_gets_what_it_lacks_at_the_next_start(run: Run, hanging: list[Hanging]) -> None:
    tracker = Hanging("log")
    hanging.append(tracker)
    run.write(range(1, 4))
    close(run.feed(tracker), timeout=0.05)
    after = Kept()
    close(run.feed(after))
    assert after.points == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_a_service_is_not_sent_again_what_it_has_after_a_kill(run: Run) -> None:
    points: list[tuple[int, float]] = []
    run.write(range(1, 8), checkpoint=4)
    close(run.feed(Kept(points)), "failed")
    run.cut(4)
    run.write(range(5, 10))
    close(run.feed(Kept(points)))
    assert points == [(step, float(step)) for step in range(1, 10)]


def test_a_service_has_one_value_of_each_step_that_a_rollback_repeats(run: Run) -> None:
    points: list[tuple[int, float]] = []
    run.write(range(1, 7), checkpoint=4)
    with run.path.open("a") as file:
        file.write(json.dumps({"timestamp": 7.0, "global_step": 7, "kind": "decision", "flag": "rollback"}) + "\n")
    close(run.feed(Kept(points)), "failed")
    run.cut(4)
    run.write(range(5, 10), factor=10.0)
    close(run.feed(Kept(points)))
    assert points == [*((step, float(step)) for step in range(1, 7)), (7, 70.0), (8, 80.0), (9, 90.0)]


def test_tags_that_a_service_lacks_of_a_step_that_comes_again_are_sent(run: Run) -> None:
    def write(step: int, **tags: float) -> None:
        columns = {"step": [step], "samples": [step], "timestamp": [1.0], "tags": tags, "vs_samples": []}
        with run.path.open("a") as file:
            file.write(json.dumps({"timestamp": 1.0, "global_step": step, "kind": "tags", "bridge": columns}) + "\n")

    service = Kept()
    for lm_loss in (0.5, 0.75):
        run.write(range(1, 5), checkpoint=4)
        write(5, **{"lm loss": lm_loss})
        close(run.feed(service, names=["bridge"]), "failed")
        run.cut(0)
    for _ in range(2):  # at the second time the service has both tags, from two lines
        run.write(range(1, 5), checkpoint=4)
        write(5, **{"lm loss": 0.75})
        write(5, **{"lm loss validation": 0.25})
        close(run.feed(service, names=["bridge"]), "failed")
        run.cut(0)
    sent = [(call[2], call[1]) for call in service.calls if call[0] == "log"]
    assert sent == [(5, {"lm loss": 0.5}), (5, {"lm loss validation": 0.25})]


def test_what_a_service_may_have_lost_in_a_kill_is_sent_again(run: Run) -> None:
    """Its package writes with a delay: the progress that is kept is older."""

    class Late(Remembering):
        settling_seconds = 600.0

    tracker = Late()
    run.write(range(1, 4))
    feed = run.feed(tracker)
    while tracker.steps != [1, 2, 3]:
        feed.wake()
    time.sleep(0.5)  # by then the progress would have been kept
    feed.wake()
    assert feed.settled is not None
    assert feed.settled.step < 1
    again = Remembering()
    other = TrackerFeed(again)
    other.open(identity(run.directory), RecordLines(run.path), None, feed.settled)
    close(other)
    close(feed)
    assert again.steps == [1, 2, 3]


class Forgetful(Kept):
    """A service that says so if it no longer has a run: in `open` or, if that asks nothing, in `log`."""

    def __init__(self, says_in: str) -> None:
        super().__init__()
        self.says_in, self.has_run = says_in, True

    def open(self, run: Any, state: Any) -> None:
        super().open(run, state)
        if self.says_in == "open" and state and not self.has_run:
            raise CannotContinueError("no such run")
        self.has_run = self.has_run or not state

    def log(self, metrics: Any, step: int, timestamp: float) -> None:
        if not self.has_run:
            raise CannotContinueError("no such run")
        super().log(metrics, step, timestamp)

    def restart_empty(self) -> None:
        self.points.clear()
        self.has_run = False


@pytest.mark.parametrize("says_in", ["open", "log"])
def test_a_service_that_restarts_empty_gets_the_whole_run(says_in: str, run: Run) -> None:
    tracker = Forgetful(says_in)
    run.write(range(1, 6), checkpoint=3)
    close(run.feed(tracker))
    tracker.restart_empty()
    run.write(range(6, 8))
    close(run.feed(tracker))
    assert tracker.points == [(step, float(step)) for step in range(1, 8)]
    close(run.feed(tracker))
    assert len(tracker.points) == 7


def test_a_kill_just_after_an_empty_service_has_begun_the_run_loses_nothing(run: Run) -> None:
    file = run.directory / "trackers" / "remembering.json"

    class Begins(Forgetful):
        left_by_a_kill = b""

        def open(self, run: Any, state: Any) -> None:
            super().open(run, state)
            self.left_by_a_kill = file.read_bytes()

    tracker = Begins("open")
    run.write(range(1, 6), checkpoint=3)
    close(run.feed(tracker))
    tracker.restart_empty()
    close(run.feed(tracker))
    file.write_bytes(tracker.left_by_a_kill)
    tracker.points.clear()
    close(run.feed(tracker))
    assert tracker.points == [(step, float(step)) for step in range(1, 6)]


def test_a_service_that_restarts_empty_in_the_run_gets_the_whole_run(run: Run) -> None:
    tracker = Forgetful("log")
    run.write(range(1, 4))
    feed = run.feed(tracker)
    while tracker.steps != [1, 2, 3]:
        feed.wake()
    tracker.restart_empty()
    run.write(range(4, 6))
    close(feed)
    assert tracker.points == [(step, float(step)) for step in range(1, 6)]


def test_a_service_that_loses_the_run_at_the_same_line_again_gets_the_run_twice(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("onstep.trackers.lines._BLOCK", 256)  # lines that are sent before a failure are a success

    class Loses(Kept):
        def log(self, metrics: Any, step: int, timestamp: float) -> None:
            if step == 40:
                raise CannotContinueError("no such run")
            super().log(metrics, step, timestamp)

    tracker = Loses()
    run.write(range(1, 51))
    close(run.feed(tracker))
    before, after = list(range(1, 40)), list(range(41, 51))
    assert [step for step, _ in tracker.points] == before + before + after
    assert "refuses a line of step 40, which it will lack" in warnings(caplog)[-1]


def test_a_service_that_never_has_the_run_only_costs_a_warning(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    run.write(range(1, 4))
    close(run.feed(Raising("open", error=CannotContinueError("no such run"))))
    assert "failed with CannotContinueError: no such run" in warnings(caplog)[0]


def test_an_evaluation_that_is_repeated_adds_no_second_point(run: Run) -> None:
    tracker = Remembering()
    first = {"kind": "evaluation", "global_step": 4, "epoch": 1.0, "eval_loss": 2.0, "eval_runtime": 1.0}
    lines = [
        {"global_step": 4, "kind": "log", "epoch": 1.0, "loss": 3.0},
        first,
        {**first, "eval_runtime": 1.5},
        {**first, "eval_loss": 2.5, "eval_runtime": 1.6},
        {"global_step": 4, "kind": "test", "epoch": 1.0, "test_loss": 2.0, "test_runtime": 1.0},
        {"global_step": 5, "kind": "evaluation", "epoch": 1.0, "eval_loss": 2.5, "eval_runtime": 1.6},
    ]
    run.path.write_text("".join(json.dumps({"timestamp": 1.0, **line}) + "\n" for line in lines))
    close(run.feed(tracker))
    assert [call[1] for call in tracker.calls if call[0] == "log"] == [
        {"train/epoch": 1.0, "train/loss": 3.0},
        {"eval/loss": 2.0, "eval/runtime": 1.0},
        {"eval/loss": 2.5, "eval/runtime": 1.6},
        {"test/loss": 2.0, "test/runtime": 1.0},
        {"train/epoch": 1.0, "eval/loss": 2.5, "eval/runtime": 1.6},
    ]


@pytest.mark.parametrize("to", [4, 2, 0])
def test_a_rollback_leaves_one_curve_in_files(to: int, run: Run) -> None:

    run.write(range(1, 8), checkpoint=4)
    feeds = [run.feed(make_tracker("csv")), run.feed(make_tracker("tensorboard"))]
    while any(feed.settled is None or feed.settled.step < 7 for feed in feeds):
        for feed in feeds:
            feed.wake()
    run.cut(to)
    run.write(range(to + 1, 10), factor=10.0)
    for feed in feeds:
        close(feed)
    expected = [(step, float(step if step <= to else 10 * step)) for step in range(1, 10)]
    rows = table(run.directory / "metrics.csv")
    assert list(zip(rows.step, rows.loss, strict=True)) == expected
    assert scalars(run.directory / "tensorboard")["train/loss"] == expected


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"places": 7}', '{"run_id": "abc", "places": [{"end": "x"}]}'])
def test_a_damaged_progress_is_said_so_and_everything_is_sent(
    content: str, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    run.write(range(1, 4))
    file = run.directory / "trackers" / "remembering.json"
    file.parent.mkdir()
    file.write_text(content)
    tracker = Kept()
    close(run.feed(tracker))
    assert [step for step, _ in tracker.points] == [1, 2, 3]
    assert "gets the whole run again" in warnings(caplog)[0]


def test_a_table_that_lost_its_end_is_written_again(run: Run) -> None:

    run.write(range(1, 6))
    close(run.feed(make_tracker("csv")))
    path = run.directory / "metrics.csv"
    path.write_bytes(path.read_bytes()[:60])
    close(run.feed(make_tracker("csv")))
    assert list(table(path).step) == [1, 2, 3, 4, 5]


def test_a_line_whose_second_call_fails_is_sent_from_there(run: Run) -> None:
    class Fails(Remembering):
        fails = True

        def log(self, metrics: Any, step: int, timestamp: float) -> None:
            if "train/loss" in metrics and self.fails:
                self.fails = False
                raise OSError("no route to host")
            super().log(metrics, step, timestamp)

    tracker = Fails()
    tags = {"step": [1], "samples": [1], "timestamp": [1.0], "tags": {"lm loss": 0.5}, "vs_samples": []}
    line = {"timestamp": 1.0, "global_step": 1, "kind": "log", "loss": 2.0, "bridge": tags}
    run.path.write_text(json.dumps(line) + "\n")
    close(run.feed(tracker, names=["hf", "bridge"]))
    assert [call[1] for call in tracker.calls if call[0] == "log"] == [{"lm loss": 0.5}, {"train/loss": 2.0}]


@pytest.mark.parametrize("most", [1000, 1003])
def test_files_that_cannot_grow_for_a_while_are_whole_in_the_end(most: int, run: Run) -> None:
    """The limit of the process on file sizes is the full disk that needs no special rights."""
    run.write(range(1, 60))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        feeds = [run.feed(make_tracker(name)) for name in ("csv", "tensorboard")]
        while not all(feed.is_broken for feed in feeds):
            time.sleep(0.01)
        time.sleep(0.5)  # each then tries whether only one line is refused: it would be, if the limit ended meanwhile
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    for feed in feeds:
        close(feed)
    expected = [(step, float(step)) for step in range(1, 60)]
    rows = table(run.directory / "metrics.csv")
    assert list(zip(rows.step, rows["loss"], strict=True)) == expected
    assert scalars(run.directory / "tensorboard")["train/loss"] == expected


def test_replay_sends_what_is_left(run: Run) -> None:
    (run.directory / "run.json").write_text(json.dumps({"run_id": "abc", "name": "run"}))
    points: list[tuple[int, float]] = []
    run.write(range(1, 4))
    close(run.feed(Kept(points)))
    run.write(range(4, 6))
    assert complete(run.directory, Kept(points)) == 2
    has_all = Kept(points)
    assert (complete(run.directory, has_all), has_all.calls) == (0, []), "it is not even opened"
    assert [step for step, _ in points] == [1, 2, 3, 4, 5]


def test_a_state_that_is_not_plain_only_causes_a_warning(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    class Odd(Kept):
        def state_dict(self) -> dict[str, Any]:
            return {"client": object()}

    run.write(range(1, 4))
    tracker = Odd()
    close(run.feed(tracker))
    run.write(range(4, 6))
    close(run.feed(tracker))
    assert [step for step, _ in tracker.points] == [1, 2, 3, 4, 5]
    assert "The state of the tracker 'remembering' cannot be kept (TypeError" in warnings(caplog)[0]


def test_a_line_that_is_accepted_at_the_second_try_is_not_left_out(run: Run) -> None:
    class Flaky(Kept):
        def log(self, metrics: Any, step: int, timestamp: float) -> None:
            if step % 3 == 0 and step not in refused:
                refused.add(step)
                raise OSError("try again")
            super().log(metrics, step, timestamp)

    refused: set[int] = set()
    run.write(range(1, 31))
    tracker = Flaky()
    close(run.feed(tracker))
    assert [step for step, _ in tracker.points] == list(range(1, 31))


def test_lines_that_follow_at_the_step_of_a_rollback_join_it(run: Run) -> None:

    run.write(range(1, 6), checkpoint=4)
    trackers = ["csv", "tensorboard"]
    for name in trackers:
        close(run.feed(make_tracker(name)))
    run.cut(4)
    run.write(range(4, 5), factor=10.0)
    run.write(range(5, 7))
    for name in trackers:
        close(run.feed(make_tracker(name)))
    rows = table(run.directory / "metrics.csv")
    assert list(zip(rows.step, rows.loss, strict=True)) == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0), (5, 5.0), (6, 6.0)]
    shown = scalars(run.directory / "tensorboard")["train/loss"]
    assert shown == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (4, 40.0), (5, 5.0), (6, 6.0)], "as the record has them"


@pytest.mark.parametrize("state", [{}, {"rows": -5, "step": "zz"}])
def test_files_that_were_deleted_or_states_that_are_none_lead_to_everything(state: Any, run: Run) -> None:

    run.write(range(1, 6))
    for name in ("csv", "tensorboard"):
        close(run.feed(make_tracker(name)))
        file = run.directory / "trackers" / f"{name}.json"
        progress = json.loads(file.read_text())
        if state:
            progress["places"][-1]["state"] = state
            file.write_text(json.dumps(progress))
    if not state:
        (run.directory / "metrics.csv").unlink()
        shutil.rmtree(run.directory / "tensorboard")
    for name in ("csv", "tensorboard"):
        close(run.feed(make_tracker(name)))
    assert list(table(run.directory / "metrics.csv").step) == [1, 2, 3, 4, 5]
    assert [step for step, _ in scalars(run.directory / "tensorboard")["train/loss"]] == [1, 2, 3, 4, 5]


def test_tags_that_come_late_are_taken_back_too(run: Run) -> None:
    """An evaluation's come with the next logged step, behind what the user's code sends at that."""

    def tags(*rows: tuple[int, str]) -> dict[str, Any]:
        steps = [step for step, _ in rows]
        columns = {name: [7.0 if tag == name else None for _, tag in rows] for _, name in rows}
        return {"step": steps, "samples": steps, "timestamp": [0.0] * len(rows), "tags": columns, "vs_samples": []}

    def write(step: int, kind: str, **data: Any) -> None:
        with run.path.open("a") as file:
            file.write(json.dumps({"timestamp": 0.0, "global_step": step, "kind": kind, **data}) + "\n")

    write(2, "log", loss=1.0, bridge=tags((2, "lm loss")))
    write(2, "evaluation", eval_loss=1.0)
    write(3, "tracker", to="tensorboard", metrics={"own": 1.0})
    write(3, "log", loss=1.0, bridge=tags((2, "lm loss validation"), (3, "lm loss")))
    for _ in range(3):
        close(run.feed(make_tracker("tensorboard"), names=["bridge"]))
    shown = scalars(run.directory / "tensorboard")
    assert (shown["lm loss validation"], shown["own"]) == ([(2, 7.0)], [(3, 1.0)])


def test_without_a_record_lines_that_a_tracker_has_are_dropped(tmp_path: Path) -> None:
    """Tags for each step, as of a rank that has no record: neither memory nor checkpoints grow with the run."""

    logger = TrackerLogger(TrackerFeed(make_tracker("tensorboard"), names=["bridge"]))
    logger.open(identity(tmp_path), is_new=True)
    for step in range(1, 101):
        logger.add_tags({"lm loss": float(step)}, {"lm loss vs samples": float(step)}, step, 4 * step)
    logger.close()
    assert [line["global_step"] for line in logger.state_dict()["lines"]] == [100, 100]
    feed, lines = opened(make_tracker("csv"), tmp_path)
    for step in range(1, 101):
        add(lines, feed, step)
    close(feed)
    assert [line.data["global_step"] for line in lines.read(Line({}, 0))] == [100]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_is_killed_costs_one_warning(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    tracker = Kept()
    tracker.name = "killed"
    feed = run.feed(tracker)
    [thread] = [one for one in threading.enumerate() if one.name == "tracker-killed"]
    assert thread.ident is not None
    while thread.is_alive():  # where it calls the tracker, it survives
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
        feed.wake()
        thread.join(0.01)
    run.write(range(1, 4))
    feed.wake()
    assert feed.is_broken
    close(feed)
    assert len(warnings(caplog)) == 1
    close(run.feed(tracker))
    assert [step for step, _ in tracker.points] == [1, 2, 3]


def test_a_new_run_in_a_directory_is_not_mistaken_for_the_one_before(run: Run) -> None:
    """With the same id, while the tracker was down from its beginning to its end."""
    first, down, second = Kept(), Raising("open"), Kept()
    logger = TrackerLogger(TrackerFeed(first))
    run.write(range(1, 9))
    logger.open(identity(run.directory), run.path, is_new=True)
    logger.close()
    run.path.unlink()
    run.write(range(1, 6), factor=10.0)
    logger = TrackerLogger(TrackerFeed(down))
    logger.open(identity(run.directory), run.path, is_new=True)
    logger.close()
    close(run.feed(second))
    assert second.points == [(step, 10.0 * step) for step in range(1, 6)]


def test_calls_that_fail_do_not_cost_a_line(tmp_path: Path) -> None:
    tracker = Remembering()
    feed, lines = opened(tracker, tmp_path, breaker=CircuitBreaker(2, retry_seconds=60.0))
    for _ in range(2):
        feed.call(lambda: [][0])
    for step in range(3):
        lines.append({"loss": 1.0}, step)
    close(feed)
    assert tracker.steps == [0, 1, 2]


def test_replay_continues_a_tracker_under_its_own_names_and_id(run: Run) -> None:
    """As one that shows Megatron Bridge's tags alone."""
    (run.directory / "run.json").write_text(json.dumps({"run_id": "abc", "name": "run"}))
    run.write(range(1, 4))
    feed = TrackerFeed(Kept(), names=["bridge"])
    file = run.directory / "trackers" / "remembering.json"
    feed.open(identity(run.directory, run_id="abc-bridge"), RecordLines(run.path), file)
    close(feed)
    with run.path.open("a") as record:
        tags = {"step": [4], "samples": [16], "timestamp": [0.0], "tags": {"lm loss": 2.0}, "vs_samples": []}
        record.write(
            json.dumps({"timestamp": 0.0, "global_step": 4, "kind": "log", "loss": 2.0, "bridge": tags}) + "\n"
        )
    tracker = Kept()
    assert complete(run.directory, tracker) == 1
    assert tracker.calls[0][1].run_id == "abc-bridge"
    assert [call[1] for call in tracker.calls if call[0] == "log"] == [{"lm loss": 2.0}]


def test_a_replay_has_the_options_of_the_run(run: Run) -> None:
    config = {"logger": {"wandb_project": "mine", "no_key": 1}, "trainer": {"run_name": "night"}}
    (run.directory / "run.json").write_text(json.dumps({"run_id": "abc", "config": config}))
    assert recorded_options(run.directory, "wandb") == {"project": "mine", "run_name": "night"}


def test_a_table_whose_record_is_gone_is_kept_aside(run: Run) -> None:

    run.write(range(1, 6))
    close(run.feed(make_tracker("csv")))
    run.path.unlink()
    assert not can_complete(run.directory, "csv")
    run.write(range(6, 8))
    close(run.feed(make_tracker("csv")))
    assert list(table(run.directory / "metrics.csv").step) == [6, 7]
    assert list(table(run.directory / "metrics.1.csv").step) == [1, 2, 3, 4, 5]
