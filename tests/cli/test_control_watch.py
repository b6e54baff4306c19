"""`onstep control watch`: into a pipe, on a terminal, and when the job or the user ends it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onstep.cli.control.event_lines import event_lines
from onstep.cli.control.watch import Screen
from onstep.cli.main import main
from onstep.control.feed import FeedEvent
from onstep.record import MetricsLog
from tests.support.steered_job import SteeredJob, steered_job
from tests.support.waiting import PATIENCE

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONSTEP_REGISTRY", str(tmp_path / "registry"))


@pytest.fixture
def job() -> Iterator[SteeredJob]:
    with steered_job() as found:
        yield found


DECISION = {
    "step": 8,
    "flag": "set",
    "author": "onstep at 127.0.0.1",
    "reason": "a\x1b[2Jb",
    "details": {"key": "lr_factor", "value": 0.5},
}


def when_watched(job: SteeredJob) -> None:
    """Log a step and report the end as soon as somebody watches."""

    def report() -> None:
        asked = job.feed.events_after
        watched = threading.Event()

        def events_after(*words: object, **settings: object) -> object:
            if len(words) > 1 and words[1] is None:  # the stream asks for all kinds
                watched.set()
            return asked(*words, **settings)  # type: ignore[arg-type]

        job.feed.events_after = events_after  # type: ignore[method-assign, assignment]
        assert watched.wait(PATIENCE)
        job.log(loss=2.5, learning_rate=3e-4)
        job.feed.add_event("decision", DECISION)
        job.end()

    threading.Thread(target=report, daemon=True).start()


def test_a_pipe_gets_a_line_for_each_event_until_the_end(job: SteeredJob, capsys: Captured) -> None:
    for step in (5, 6):
        saved = {"step": step, "flag": "saved", "author": "the loop", "details": {"checkpoint_step": step}}
        job.feed.add_event("save", saved)
    when_watched(job)
    assert main(["control", "watch", "-n", "1"]) == 0
    found = capsys.readouterr()
    heading, *lines = found.out.splitlines()
    assert heading == "job_a: running in /somewhere/runs/tiny"
    assert [" ".join(line.split()[2:]) for line in lines] == [
        "step 6 save checkpoint of step 6 saved, by the loop",
        "step 8 metrics loss 2.5 learning_rate 0.0003",
        "step 8 decision lr_factor set to 0.5, by onstep at 127.0.0.1: a?[2Jb",
        "step 8 end completed",
    ]
    assert found.err == ""


def test_json_is_a_line_for_each_event(job: SteeredJob, capsys: Captured) -> None:
    job.log(loss=2.0)
    job.end()
    assert main(["control", "watch", "--json"]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(event["kind"], event["data"]["step"]) for event in events] == [("end", 8)]


def test_a_job_that_has_ended_is_not_waited_for(job: SteeredJob, capsys: Captured) -> None:
    job.end("stopped")
    assert main(["control", "watch"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("end         stopped")


def test_a_terminal_has_a_line_that_is_updated_below_the_events(
    job: SteeredJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = os.openpty()
    monkeypatch.setenv("COLUMNS", "100")
    when_watched(job)
    with os.fdopen(far, "w") as terminal, monkeypatch.context() as patched:
        patched.setattr("sys.stdout", terminal)
        assert main(["control", "watch"]) == 0
        terminal.flush()
        text = ""
        while "end         completed" not in text:
            text += os.read(near, 65536).decode()
    os.close(near)
    assert "step 7 of 100 (7.0%)  2.5 steps/s  0:01:33 left" in text
    assert "\r\x1b[Kstep 8 of 100 (7.0%)  loss 2.5  learning_rate 0.0003  2.5 steps/s  0:01:33 left" in text
    assert "decision    lr_factor set to 0.5, by onstep" in text
    assert "metrics" not in text


def test_the_last_line_fits_the_terminal_and_is_redrawn_after_a_line(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    screen = Screen(is_terminal=True)
    screen.update("x" * 40)
    screen.print_lines(["event"])
    screen.clear()
    last = capsys.readouterr().out
    short = "xxxxxxxxx...xxxxxxxxxxxxxxxxx"
    assert last == f"{short}\r\x1b[Kevent\n{short}\r\x1b[K"


JOB = """
import sys
sys.path.insert(0, {root!r})
from tests.support.steered_job import SteeredJob
job = SteeredJob(output_dir={directory!r})
print("ready", flush=True)
sys.stdin.read()
"""
ROOT = str(Path(__file__).parents[2])


@pytest.fixture
def other_process(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A job in a process of its own."""
    code = JOB.format(root=ROOT, directory=str(tmp_path / "run"))
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def started(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "onstep", "control", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("job_a: running")
    return process


@pytest.mark.process
def test_a_killed_job_ends_watching_with_an_error(other_process: subprocess.Popen[str], tmp_path: Path) -> None:
    with MetricsLog.open(tmp_path / "run" / "trainer_logs.json"):
        pass
    (tmp_path / "run" / "run.json").write_text(json.dumps({"status": "failed"}))
    watching = started("watch", "job_a")
    other_process.send_signal(signal.SIGKILL)
    out, err = watching.communicate(timeout=PATIENCE)
    assert (watching.returncode, out) == (1, "")
    assert err == (
        f"error: job_a has ended: its process {other_process.pid} is gone; `onstep control cleanup` removes its entry. "
        "(the run failed)\n"
    )


@pytest.mark.process
def test_ctrl_c_ends_watching_and_not_the_job(other_process: subprocess.Popen[str]) -> None:
    watching = started("watch")
    watching.send_signal(signal.SIGINT)
    _, err = watching.communicate(timeout=PATIENCE)
    assert (watching.returncode, "Traceback" in err) == (0, False)
    assert other_process.poll() is None


@pytest.mark.parametrize(
    ("kind", "data", "text"),
    [
        ("command", {"command": "set", "data": {"key": "lr_factor", "value": 0.5}, "author": "a", "status": "applied"},
         "set key lr_factor  value 0.5, by a: applied"),
        ("command", {"command": "save", "data": {}, "author": "a", "status": "refused", "message": "no"},
         "save, by a: refused: no"),
        ("sample", {"step": 3, "prompt": "def ", "text": "f\n"}, "'def ' -> 'f\\n'"),
        ("save", {"step": 3, "flag": "saved", "author": "the loop", "details": {"checkpoint_step": 3}},
         "checkpoint of step 3 saved, by the loop"),
        ("decision", {"flag": "skip_batch", "author": "a", "details": {"count": 2}},
         "the batches of 2 steps skipped, by a"),
        ("end", {"reason": "failed", "error": "ValueError: no"}, "failed: ValueError: no"),
        ("evaluation", {"step": 3, "eval_loss": 1.0, "note": None}, "eval_loss 1"),
    ],
)  # fmt: skip
def test_an_event_is_a_line(kind: str, data: dict[str, Any], text: str) -> None:
    [line] = event_lines(FeedEvent(1, kind, 0.0, data))
    assert line[19:].split(maxsplit=3 if "step" in data else 1)[-1] == text


def test_a_rollback_has_a_second_line() -> None:
    details = {"to_step": 4, "bad_step": 9, "lr_factor": 0.5}
    lines = event_lines(FeedEvent(1, "decision", 0.0, {"step": 4, "flag": "rolled_back", "details": details}))
    assert lines[1] == "    the data continues after step 9; the factor on the learning rate is now 0.5"
