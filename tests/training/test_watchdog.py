"""A process alone that hangs ends with a report; whatever only looks like it goes on."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from itertools import pairwise
from mmap import mmap
from pathlib import Path
from typing import Any

import pytest

from onstep import Callback, CallbackManager
from onstep.processes.heartbeat import HEARTBEAT, PAGE_BYTES, read_page
from onstep.training.watchdog import watchdog
from onstep.training.watchdog.stacks import DUMP_SIGNAL
from tests.support.forked_processes import Processes, output_of
from tests.support.small_runs import run, small_state
from tests.support.waiting import until

JOBS = "tests.support.jobs.hanging_jobs"


@pytest.mark.parametrize("how", ["sleep", "read", "late"])
def test_one_process_that_hangs_reports_and_ends(processes: Processes, tmp_path: Path, how: str) -> None:
    codes = processes.run(JOBS, "train", tmp_path, {"how": how, "suspect": 0, "seconds_allowed": 3.0})
    output = output_of(tmp_path)
    assert codes == [1], output
    assert output.count("first failure: rank 0 hangs: no progress for") == 1, output
    place = {"sleep": "do_sleep", "read": "__getitem__", "late": "forward"}[how]
    assert f"in {place}" in output.split("last activity of each rank")[0]
    content = json.loads((tmp_path / "run" / "run.json").read_text())
    assert content["status"] == "failed"
    assert content["error"].startswith("rank 0 hangs")
    pid = re.search(r"stacks of rank 0 \(process (\d+)\)", output)
    assert pid is not None
    assert not list(Path(tempfile.gettempdir()).glob(f"onstep-stacks-*-{pid[1]}-*")), "what os._exit leaves"
    (written,) = (tmp_path / "run").glob("first-culprit-*.txt")
    assert written.read_text() in output


def test_one_process_that_raises_adds_nothing(processes: Processes, tmp_path: Path) -> None:
    assert processes.run(JOBS, "train", tmp_path, {"how": "raise", "suspect": 0}) == [1]
    assert "first failure" not in output_of(tmp_path)
    assert not list((tmp_path / "run").glob("first-culprit-*"))


def test_slow_steps_go_on(processes: Processes, tmp_path: Path) -> None:
    settings = {"how": "dawdle", "suspect": 0, "seconds": 1.1, "seconds_allowed": 3.0, "max_steps": 3}
    assert processes.run(JOBS, "train", tmp_path, settings) == [0], output_of(tmp_path)


def test_without_a_limit_nothing_watches() -> None:
    names: list[str] = []
    state = small_state(train_iters=2)
    state.cfg.ft.watchdog_seconds = None
    manager = CallbackManager()
    manager.register("on_step_end", lambda: names.extend(one.name for one in threading.enumerate()))
    run(state, manager)
    assert not any("onstep-watchdog" in name for name in names)


def test_threads_signals_and_files_are_given_back() -> None:
    names: list[str] = []
    state = small_state(train_iters=2)
    manager = CallbackManager()
    manager.register("on_step_end", lambda: names.extend(one.name for one in threading.enumerate()))
    own_files = f"onstep-stacks-*-{os.getpid()}-*"  # other runs on this machine have files there too
    files, threads = set(Path(tempfile.gettempdir()).glob(own_files)), threading.enumerate()
    run(state, manager)
    assert names.count("onstep-watchdog") == 2, "it watches both steps"
    assert set(Path(tempfile.gettempdir()).glob(own_files)) == files
    assert not [one for one in threading.enumerate() if one not in threads]
    assert DUMP_SIGNAL is None or signal.getsignal(DUMP_SIGNAL) == signal.SIG_DFL


def test_files_of_killed_processes_go_once_the_other_ranks_have_opened_them() -> None:
    own: list[str] = []
    manager = CallbackManager()
    manager.register(
        "on_step_end",
        lambda: own.extend(map(str, Path(tempfile.gettempdir()).glob(f"onstep-stacks-*-{os.getpid()}-*"))),
    )
    run(small_state(train_iters=1), manager)
    killed = subprocess.Popen([sys.executable, "-c", ""])
    killed.wait()
    fresh, old = (Path(own[0].replace(f"-{os.getpid()}-", f"-{killed.pid}-") + end) for end in ("fresh", "old"))
    try:
        for one in (fresh, old):
            one.touch()
        os.utime(old, (time.time() - 100,) * 2)
        run(small_state(train_iters=1), CallbackManager())
        assert (fresh.exists(), old.exists()) == (True, False)
    finally:
        fresh.unlink()


def test_every_call_and_micro_batch_is_a_sign_of_life() -> None:
    beats: dict[str, list[int]] = {"told": [], "computed": []}
    inside: list[Any] = []

    class Notes(Callback):
        def on_forward_backward_end(self, context: Any) -> None:
            beats["computed"].append(HEARTBEAT.beats)

        def on_step_end(self, context: Any) -> None:
            beats["told"].append(HEARTBEAT.beats)
            inside.append(HEARTBEAT.callback)

    manager = CallbackManager()
    manager.add(Notes())
    run(small_state(train_iters=2), manager)
    assert inside == [("on_step_end", "Notes")] * 2
    assert HEARTBEAT.callback is None, "no callback is called after the run"
    for counts in beats.values():
        assert all(later > earlier for earlier, later in pairwise(counts)), counts


def test_a_page_for_other_processes_names_the_callback_that_runs() -> None:
    inside: list[Any] = []
    page, manager = mmap(-1, PAGE_BYTES), CallbackManager()

    def note_page(context: Any) -> None:
        inside.append(read_page(page[:])[1])

    manager.register("on_step_end", note_page)
    outer = HEARTBEAT.write_to(page)
    try:
        run(small_state(train_iters=2), manager)
        with HEARTBEAT.calling("state_dict", "Notes"):
            inside.append(read_page(page[:])[1])
        after = read_page(page[:])[1]
    finally:
        HEARTBEAT.write_to(outer)
    assert [event for event, _ in inside] == ["on_step_end", "on_step_end", "state_dict"]
    assert inside[0][1].endswith("note_page"), inside
    assert after is None


def test_a_traced_process_is_not_watched(processes: Processes, tmp_path: Path) -> None:
    """As a debugger does: nothing ends while somebody looks at it."""
    settings = {"how": "sleep", "suspect": 0, "seconds_allowed": 1.0, "max_steps": 4}
    assert processes.run(JOBS, "traced", tmp_path, settings) == [0], output_of(tmp_path)
    assert "first failure" not in output_of(tmp_path)


@pytest.mark.process
@pytest.mark.slow
def test_a_pause_of_the_whole_run_is_not_counted(processes: Processes, tmp_path: Path) -> None:
    """Ctrl-Z and fg, or a laptop that slept: of one process, and of two ranks, for longer than any limit of theirs."""
    settings = {"how": "dawdle", "suspect": 0, "seconds": 0.8, "seconds_allowed": 3.0, "max_steps": 6}
    started = processes.start(JOBS, "train", tmp_path / "alone", settings)
    started += processes.start(JOBS, "train", tmp_path / "two", settings, ranks=2)
    until(lambda: len(list(tmp_path.glob("*/began"))) == 2)
    for number, seconds in ((signal.SIGSTOP, 7.0), (signal.SIGCONT, 0.0)):
        for process in started:
            process.send_signal(number)
        time.sleep(seconds)
    said = "".join(output_of(tmp_path / name) for name in ("alone", "two"))
    assert [process.wait() for process in started] == [0, 0, 0], said
    assert "first failure" not in said


def test_the_interval_follows_the_limit() -> None:
    assert [watchdog.interval_of(seconds) for seconds in (1, 10, 1800)] == [0.1, 0.5, 1.0]
