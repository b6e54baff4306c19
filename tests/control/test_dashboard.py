"""The dashboard: runs from their files, and jobs that serve themselves."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from onstep.control.dashboard.dashboard import Dashboard
from onstep.control.dashboard.file_job import FileJob
from onstep.control.dashboard.server import serve
from onstep.control.registry import JobInfo, Registration
from onstep.errors import ConfigError
from tests.support.control_server import TOKEN, Served, served
from tests.support.waiting import PATIENCE, until

DECISION = {"timestamp": 5.0, "step": 4, "flag": "saved", "author": "the loop", "details": {"path": "checkpoint-4"}}
SAMPLE = {"timestamp": 6.0, "step": 4, "prompt": "def ", "text": "f(x)"}
LINES = {"decisions.jsonl": DECISION, "text_samples.jsonl": SAMPLE}


def write_run(directory: Path, *, status: str = "completed", steps: int = 5, name: str | None = None) -> Path:
    """The files of a run; returns its directory."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {"train": {"train_iters": 10}}
    content = {"name": name or directory.name, "status": status, "step": steps, "started_at": 1.0, "config": config}
    (directory / "run.json").write_text(json.dumps(content))
    records = [{"timestamp": 1.0 + step, "global_step": step, "loss": 5.0 - step / 10} for step in range(1, steps + 1)]
    (directory / "trainer_logs.json").write_text("[\n" + ",\n".join(map(json.dumps, records)) + "\n]\n")
    for file, line in LINES.items():
        (directory / file).write_text(json.dumps(line) + "\n")
    return directory


def add_record(directory: Path, **record: Any) -> None:
    """Append to a metrics log as its writer does."""
    path = directory / "trainer_logs.json"
    path.write_text(f"{path.read_text().rstrip().removesuffix(']').rstrip()},\n{json.dumps(record)}\n]\n")


@pytest.fixture
def browse(registry: Path) -> Iterator[Callable[..., httpx.Client]]:
    """Open a dashboard over some paths; gives a client that came in by a one-time link."""
    with ExitStack() as stack:

        def opened(*paths: Path) -> httpx.Client:
            dashboard = stack.enter_context(Dashboard(list(paths) or None))
            page = stack.enter_context(serve(dashboard, port=0))
            headers = {"Origin": page.url}
            client = stack.enter_context(
                httpx.Client(base_url=page.url, headers=headers, timeout=PATIENCE, trust_env=False)
            )
            assert client.get(page.new_link()).status_code == 303
            return client

        yield opened


def loaded(client: httpx.Client, job_id: str) -> dict[str, Any]:
    """The status of a run once its files have been read."""

    def read() -> dict[str, Any] | None:
        status = client.get(f"/jobs/{job_id}/status").json()
        return None if status.get("status") in (None, "loading") else status

    return until(read)


def kinds(client: httpx.Client, job_id: str) -> list[str]:
    """The kinds of a job's events, without metrics."""
    events = client.get(f"/jobs/{job_id}/events?stream=0").json()["events"]
    return [one["kind"] for one in events if one["kind"] != "metrics"]


def test_a_finished_run_is_shown_from_its_files(tmp_path: Path, browse: Callable[..., httpx.Client]) -> None:
    run = write_run(tmp_path / "runs" / "first")
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**record, "tokenizer": {"fingerprint": "x", "bytes_per_token": 3.5}}))
    client = browse(run.parent)
    assert [(one["job_id"], one["is_served"], one["alive"]) for one in client.get("/jobs").json()["jobs"]] == [
        ("first", True, False)
    ]
    status = loaded(client, "first")
    assert (status["status"], status["reason"], status["progress"]) == ("ended", "the run completed", 0.5)
    assert (status["tokenizer"]["fingerprint"], status["tokenizer"]["bytes_per_token"]) == ("x", 3.5)
    series = client.get("/jobs/first/metrics").json()["series"]["loss"]
    assert (series["step"], series["value"][-1]) == ([1, 2, 3, 4, 5], 4.5)
    assert kinds(client, "first") == ["decision", "save", "sample", "end"]


def test_the_samples_of_a_run_are_followed_in_its_record(tmp_path: Path, browse: Callable[..., httpx.Client]) -> None:
    run, record = write_run(tmp_path / "first", status="running"), tmp_path / "first" / "record.jsonl"
    line = {"timestamp": 7.0, "global_step": 5, "kind": "sample", "prompt": "def ", "text": "g(x)"}
    record.write_text(json.dumps({"timestamp": 1.0, "global_step": 0, "kind": "start"}) + "\n")
    client = browse(run)
    loaded(client, "first")
    record.write_text(record.read_text() + json.dumps(line) + "\n")
    until(lambda: "sample" in kinds(client, "first"))
    [event] = client.get("/jobs/first/events", params={"kinds": "sample", "stream": 0}).json()["events"]
    assert event["data"] == {"timestamp": 7.0, "step": 5, "prompt": "def ", "text": "g(x)"}


def test_a_run_without_control_is_followed_and_refuses_commands(
    tmp_path: Path, browse: Callable[..., httpx.Client]
) -> None:
    run = write_run(tmp_path / "first", status="running")
    client = browse(run)
    assert loaded(client, "first")["status"] == "running"
    add_record(run, timestamp=20.0, global_step=6, loss=3.0)
    until(lambda: client.get("/jobs/first/metrics").json()["series"]["loss"]["value"][-1] == 3.0)
    answer = client.post("/jobs/first/control", json={"command": "save_checkpoint"})
    assert answer.status_code == 409
    assert "started without control" in answer.json()["error"]


def test_a_run_that_ends_while_one_looks_says_how(tmp_path: Path, browse: Callable[..., httpx.Client]) -> None:
    run = write_run(tmp_path / "first", status="running")
    client = browse(run)
    loaded(client, "first")
    write_run(run, status="failed")
    until(lambda: client.get("/jobs/first/status").json()["status"] == "ended")
    assert client.get("/jobs/first/status").json()["reason"] == "the run failed"
    answer = client.post("/jobs/first/control", json={"command": "stacks"})
    assert (answer.status_code, answer.json()["error"]) == (409, "stacks: the run failed.")


def test_a_resumed_run_is_followed_again(tmp_path: Path, browse: Callable[..., httpx.Client]) -> None:
    run = write_run(tmp_path / "first", status="stopped")
    client = browse(run)
    assert loaded(client, "first")["status"] == "ended"
    write_run(run, status="running", steps=7)
    until(lambda: client.get("/jobs/first/status").json()["status"] == "running")
    until(lambda: client.get("/jobs/first/metrics").json()["num_points"] == 7)


def test_a_run_that_goes_back_to_a_checkpoint_has_one_curve(
    tmp_path: Path, browse: Callable[..., httpx.Client]
) -> None:
    run = write_run(tmp_path / "first", status="running", steps=9)
    client = browse(run)
    loaded(client, "first")
    assert client.get("/jobs/first/metrics").json()["num_points"] == 9
    write_run(run, status="running", steps=4)
    until(lambda: client.get("/jobs/first/metrics").json()["series"]["loss"]["step"] == [1, 2, 3, 4])
    add_record(run, timestamp=30.0, global_step=5, loss=1.0)
    until(lambda: client.get("/jobs/first/metrics").json()["series"]["loss"]["step"] == [1, 2, 3, 4, 5])
    newest = client.get("/jobs/first/events?stream=0&kinds=metrics").json()["events"]
    assert [one["data"]["global_step"] for one in newest] == [*range(1, 10), 5]


def test_new_runs_are_found_and_damaged_ones_harm_no_other(tmp_path: Path, browse: Callable[..., httpx.Client]) -> None:
    bad = write_run(tmp_path / "bad")
    for name in ("run.json", "trainer_logs.json", "decisions.jsonl", "text_samples.jsonl"):
        (bad / name).write_bytes(b'\xff\x00{"step": [1, {"a"')
    client = browse(tmp_path)
    assert loaded(client, "bad")["status"] == "ended"
    write_run(tmp_path / "second")
    until(lambda: {one["job_id"] for one in client.get("/jobs").json()["jobs"]} == {"bad", "second"})
    assert loaded(client, "second")["global_step"] == 5


HUGE = int("9" * 400)


WRITTEN_BY_NO_RUN: list[dict[str, Any]] = [
    {"global_step": float("nan")},
    {"global_step": float("inf"), "timestamp": float("-inf")},
    {"global_step": HUGE, "timestamp": HUGE, "loss": HUGE, "epoch": HUGE},
    {"global_step": 2**60, "step": True},
    {"global_step": "six", "timestamp": [], "loss": {"a": [float("nan")] * 3}},
    {"global_step": {"a": json.loads("[" * 90 + "]" * 90)}, "loss": [[1, HUGE], None]},
]


def test_a_record_that_no_run_writes_hides_neither_its_run_nor_another(
    tmp_path: Path, browse: Callable[..., httpx.Client], caplog: pytest.LogCaptureFixture
) -> None:
    other, *hostile = (write_run(tmp_path / f"runs/{number}", status="running") for number in range(7))
    for run, record in zip(hostile, WRITTEN_BY_NO_RUN, strict=True):
        add_record(run, **record)
    client = browse(tmp_path / "runs")
    for number in (6, 7):
        for run in (other, *hostile):
            add_record(run, timestamp=20.0 + number, global_step=number, loss=float(number))
        for run in (other, *hostile):
            loaded(client, run.name)
            route = f"/jobs/{run.name}/metrics"
            until(lambda route=route: client.get(route).json()["series"]["loss"]["value"][-1] == float(number))  # noqa: B023
        for run, record in zip(hostile, WRITTEN_BY_NO_RUN, strict=True):
            add_record(run, **record)
    for run in hostile:
        assert client.get(f"/jobs/{run.name}/status").json()["status"] == "running"
    assert client.get("/metrics").status_code == 200
    assert "cannot read" not in caplog.text


@pytest.mark.parametrize("value", [float("nan"), HUGE, "x", [1], None])
def test_a_hostile_run_json_hides_no_run(tmp_path: Path, browse: Callable[..., httpx.Client], value: Any) -> None:
    write_run(tmp_path / "runs" / "other")
    hostile = write_run(tmp_path / "runs" / "hostile")
    content = {
        "name": value,
        "status": value,
        "step": value,
        "started_at": value,
        "config": {"train": {"train_iters": value}},
    }
    (hostile / "run.json").write_text(json.dumps(content))
    client = browse(tmp_path / "runs")
    assert {one["output_dir"].rpartition("/")[2] for one in client.get("/jobs").json()["jobs"]} == {"hostile", "other"}
    assert loaded(client, "hostile")["progress"] is None
    assert loaded(client, "other")["progress"] == 0.5


def test_a_run_whose_reading_fails_is_named_once_and_hides_no_other(
    tmp_path: Path,
    browse: Callable[..., httpx.Client],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = [write_run(tmp_path / "runs" / name, status="running") for name in ("broken", "other")]
    client = browse(tmp_path / "runs")
    refresh = FileJob.refresh

    def fail(job: FileJob) -> None:
        if job.job_id == "broken":
            raise ZeroDivisionError("as a defect would")
        refresh(job)

    monkeypatch.setattr(FileJob, "refresh", fail)
    for number in (6, 7):
        loaded(client, "other")
        add_record(runs[1], timestamp=20.0 + number, global_step=number, loss=float(number))
        until(lambda: client.get("/jobs/other/metrics").json()["series"]["loss"]["value"][-1] == float(number))  # noqa: B023
    assert caplog.text.count("The dashboard cannot read broken") == 1


def test_runs_of_the_same_name_have_different_ids(tmp_path: Path, browse: Callable[..., httpx.Client]) -> None:
    paths = [write_run(tmp_path / place / "a run..") for place in ("x", "y")]
    ids = {one["job_id"] for one in browse(*paths).get("/jobs").json()["jobs"]}
    assert ids == {"a-run", "a-run-2"}


@pytest.fixture
def live(registry: Path, tmp_path: Path) -> Iterator[Served]:
    """A job with a server, in the registry, whose commands a thread takes; its run directory is `tmp_path/live`."""
    is_over = threading.Event()
    with served("live") as job, Registration("live") as entry:
        run = write_run(tmp_path / "live", status="running")
        info = JobInfo.of_this_process("live", port=job.server.port, logging_dir=str(run))
        entry.publish(info, TOKEN)
        job.feed.update(status="running", run="live", global_step=5)

        def work() -> None:
            while not is_over.wait(0.01):
                for ticket in job.inbox.take():
                    job.inbox.settle(ticket, "applied", step=7, result={"rank 0": "a stack"})

        thread = threading.Thread(target=work)
        thread.start()
        yield job
        is_over.set()
        thread.join()


def test_a_job_with_control_is_listed_once_and_steered(
    tmp_path: Path, live: Served, browse: Callable[..., httpx.Client]
) -> None:
    client = browse(tmp_path)
    assert [one["job_id"] for one in client.get("/jobs").json()["jobs"]] == ["live"]
    answer = client.post("/jobs/live/control", json={"command": "stacks", "wait": 10}).json()
    assert (answer["ticket"]["status"], answer["ticket"]["step"]) == ("applied", 7)
    assert client.get(f"/jobs/live/commands/{answer['id']}").json()["result"] == {"rank 0": "a stack"}
    assert client.post("/jobs/live/control", json={"command": "fly"}).status_code == 400
    live.inbox.close("training has ended at step 9.")
    refused = client.post("/jobs/live/control", json={"command": "evaluate"})
    assert (refused.status_code, refused.json()["error"]) == (409, "evaluate: training has ended at step 9.")


def test_the_feed_of_a_job_with_control_is_forwarded(live: Served, browse: Callable[..., httpx.Client]) -> None:
    for step in range(1, 4):
        live.feed.add_record({"global_step": step, "timestamp": float(step), "loss": 1.0 / step})
    live.feed.add_event("sample", {"step": 3, "prompt": "a", "text": "b"})
    client = browse()
    assert loaded(client, "live")["status"] == "running"
    live.feed.add_record({"global_step": 4, "timestamp": 4.0, "loss": 0.5})
    live.feed.add_event("decision", {"step": 4, "flag": "set"})
    until(lambda: kinds(client, "live") == ["sample", "decision"])
    series = client.get("/jobs/live/metrics").json()["series"]["loss"]
    assert (series["step"], series["value"]) == ([1, 2, 3, 4], [1.0, 0.5, 1.0 / 3.0, 0.5])
    live.feed.update(status="ended", reason="max_steps")
    live.feed.add_event("end", {"reason": "max_steps"})
    until(lambda: client.get("/jobs/live/status").json()["status"] == "ended")
    assert kinds(client, "live") == ["sample", "decision", "end"]


def test_a_job_with_control_that_is_rolled_back_has_one_curve(
    live: Served, browse: Callable[..., httpx.Client]
) -> None:
    for step in range(1, 9):
        live.feed.add_record({"global_step": step, "timestamp": float(step), "loss": 1.0})
    client = browse()
    assert loaded(client, "live")["status"] == "running"
    assert client.get("/jobs/live/metrics").json()["num_points"] == 8
    live.feed.history.begin_again([{"global_step": step, "timestamp": float(step), "loss": 1.0} for step in (1, 2)])
    live.feed.add_event("decision", {"step": 2, "flag": "rolled_back"})
    until(lambda: client.get("/jobs/live/metrics").json()["num_points"] == 2)


def test_a_job_whose_server_is_gone_is_shown_as_ended(
    tmp_path: Path, registry: Path, live: Served, browse: Callable[..., httpx.Client]
) -> None:
    client = browse()
    loaded(client, "live")
    write_run(tmp_path / "live", status="stopped")
    live.server.stop()
    (registry / "live" / "endpoint.json").unlink()
    until(lambda: client.get("/jobs/live/status").json()["status"] == "ended")
    assert client.get("/jobs/live/status").json()["reason"] == "the run was stopped"
    assert client.post("/jobs/live/control", json={"command": "evaluate"}).status_code == 409


def test_the_token_of_a_job_never_reaches_the_browser(live: Served, browse: Callable[..., httpx.Client]) -> None:
    client = browse()
    loaded(client, "live")
    routes = (
        "jobs",
        "jobs/live/status",
        "jobs/live/events?stream=0",
        "jobs/live/metrics",
        "metrics",
        "openapi.json",
        "",
    )
    for route in routes:
        assert TOKEN not in client.get(f"/{route}").text
    assert client.get("/jobs", headers={"Cookie": ""}).status_code == 401


def test_a_path_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"RUNS must be .*no-such-run does not exist"):
        Dashboard([tmp_path / "no-such-run"])


@pytest.mark.process
def test_the_command_prints_a_link_and_ends_on_ctrl_c(tmp_path: Path) -> None:
    write_run(tmp_path / "first")
    code = "from onstep.cli.application import application_at; application_at('dashboard:dashboard')()"
    arguments = [sys.executable, "-c", code, str(tmp_path), "--no-browser", "--port", "0"]
    environment = {**os.environ, "ONSTEP_REGISTRY": str(tmp_path / "registry")}
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True)
    try:
        assert process.stdout is not None
        assert "1 run at" in process.stdout.readline()
        link = re.search(r"http://127\.0\.0\.1:\d+/login/\S+", process.stdout.readline())
        assert link is not None
        assert httpx.get(link[0], trust_env=False, timeout=PATIENCE).status_code == 303
        assert httpx.get(link[0], trust_env=False, timeout=PATIENCE).status_code == 401
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE)
        assert (process.returncode, errors) == (0, "")
    finally:
        process.kill()
        process.communicate()
