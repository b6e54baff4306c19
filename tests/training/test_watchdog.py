"""A process alone that hangs ends with a report; whatever only looks like it goes on."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from small_runs import run, small_state

from forked_processes import Processes, output_of
from onstep import Callback, CallbackManager
from onstep.heartbeat import PULSE
from onstep.training.watchdog import watchdog
from onstep.training.watchdog.stacks import DUMP_SIGNAL

JOBS = Path(__file__).parents[1] / "distributed" / "hanging_jobs.py"


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    server = Processes("onstep.trainer")
    yield server
    server.close()


@pytest.mark.parametrize("how", ["sleep", "read", "late"])
def test_one_process_that_hangs_reports_and_ends(processes: Processes, tmp_path: Path, how: str) -> None:
    codes = processes.run(JOBS, "train", tmp_path, {"how": how, "culprit": 0, "seconds_allowed": 1.5})
    output = output_of(tmp_path)
    assert codes == [1], output
    assert output.count("first culprit: rank 0 hangs: no progress for") == 1, output
    place = {"sleep": "do_sleep", "read": "__getitem__", "late": "forward"}[how]
    assert f"in {place}" in output.split("what each rank")[0]
    content = json.loads((tmp_path / "run" / "run.json").read_text())
    assert content["status"] == "failed"
    assert content["error"].startswith("rank 0 hangs")
    pid = re.search(r"stacks of rank 0 \(process (\d+)\)", output)
    assert pid is not None
    assert not list(Path(tempfile.gettempdir()).glob(f"onstep-stacks-*{pid[1]}-*")), "what os._exit leaves"
    (written,) = (tmp_path / "run").glob("first-culprit-*.txt")
    assert written.read_text() in output


def test_one_process_that_raises_adds_nothing(processes: Processes, tmp_path: Path) -> None:
    assert processes.run(JOBS, "train", tmp_path, {"how": "raise", "culprit": 0}) == [1]
    assert "first culprit" not in output_of(tmp_path)
    assert not list((tmp_path / "run").glob("first-culprit-*"))


def test_slow_steps_go_on(processes: Processes, tmp_path: Path) -> None:
    settings = {"how": "dawdle", "culprit": 0, "seconds": 0.9, "seconds_allowed": 1.5, "max_steps": 3}
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
    before = set(Path("/tmp").glob("onstep-stacks-*")), threading.active_count()
    run(state, manager)
    assert names.count("onstep-watchdog") == 2, "it watches both steps"
    assert (set(Path("/tmp").glob("onstep-stacks-*")), threading.active_count()) == before
    assert not any(one.name == "onstep-watchdog" for one in threading.enumerate())
    assert DUMP_SIGNAL is None or signal.getsignal(DUMP_SIGNAL) == signal.SIG_DFL


def test_every_telling_and_micro_batch_is_a_sign_of_life() -> None:
    beats: dict[str, list[int]] = {"told": [], "computed": []}
    inside: list[Any] = []

    class Notes(Callback):
        def on_forward_backward_end(self, context: Any) -> None:
            beats["computed"].append(PULSE.beats)

        def on_step_end(self, context: Any) -> None:
            beats["told"].append(PULSE.beats)
            inside.append(PULSE.told)

    manager = CallbackManager()
    manager.add(Notes())
    run(small_state(train_iters=2), manager)
    assert inside == [("on_step_end", "Notes")] * 2
    assert PULSE.told is None, "nobody is told after the run"
    for counts in beats.values():
        assert all(later > earlier for earlier, later in pairwise(counts)), counts


def test_a_traced_process_is_not_watched(tmp_path: Path) -> None:
    """As a debugger does: nothing ends while somebody looks at it."""
    script = f"""
import sys, json
sys.path.insert(0, {str(JOBS.parent)!r})
import hanging_jobs, time, threading, os
hanging_jobs.do_sleep = lambda settings: time.sleep(3)
os.chdir({str(tmp_path)!r})
sys.settrace(lambda *_: None)
hanging_jobs.job_train({{"how": "sleep", "culprit": 0, "seconds_allowed": 1.0, "max_steps": 4}})
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "first culprit" not in done.stderr


def test_a_pause_of_the_whole_run_is_not_counted(tmp_path: Path) -> None:
    """Ctrl-Z and fg, or a laptop that slept: of one process, and of two ranks, for longer than any limit of theirs."""
    settings = {"how": "dawdle", "culprit": 0, "seconds": 0.8, "seconds_allowed": 1.5, "max_steps": 6}
    (tmp_path / "alone").mkdir()
    (tmp_path / "two").mkdir()
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    of_group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    started = [start(tmp_path / "alone", settings)]
    started += [start(tmp_path / "two", settings, RANK=str(rank), LOCAL_RANK=str(rank), **of_group) for rank in (0, 1)]
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("*/began"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    for number, seconds in ((signal.SIGSTOP, 7.0), (signal.SIGCONT, 0.0)):
        for process in started:
            process.send_signal(number)
        time.sleep(seconds)
    errors = [process.communicate(timeout=60)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0, 0], errors
    assert "first culprit" not in "".join(errors)


def start(folder: Path, settings: dict[str, Any], **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(JOBS), "train", str(folder), json.dumps(settings)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def test_the_interval_follows_the_limit() -> None:
    assert [watchdog.interval_of(seconds) for seconds in (1, 10, 1800)] == [0.1, 0.5, 1.0]
