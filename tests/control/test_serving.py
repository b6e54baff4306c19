"""The routes of the control server, over a real socket."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import httpx
import pytest

from onstep.control.registry import JobInfo, Registration, describe_jobs
from onstep.control.serving.app import build_app
from onstep.control.serving.served_job import LiveJob
from onstep.control.serving.server import ControlServer
from onstep.errors import ConfigError
from onstep.http.access import Access
from tests.support.control_server import Served, received, served
from tests.support.waiting import PATIENCE, until


def apply_commands(job: Served, *, step: int) -> threading.Thread:
    """What the training thread does: settle the next command."""

    def settle() -> None:
        until(lambda: job.inbox.has_new)
        for ticket in job.inbox.take():
            job.inbox.settle(ticket, "applied", step=step, result={"saved": True})

    thread = threading.Thread(target=settle)
    thread.start()
    return thread


def test_a_command_is_acknowledged_and_queued(job: Served) -> None:
    body = {"command": "set", "data": {"key": "lr_factor", "value": 0.5}}
    with job.client() as client:
        answer = client.post("/jobs/job/control", json=body, headers={"User-Agent": "a-tool/2"})
    told = answer.json()
    assert answer.status_code == 200
    assert (told["status"], told["command"], told["message"]) == (
        "acknowledged",
        "set",
        "Command set queued for execution",
    )
    [ticket] = job.inbox.take()
    assert (ticket.id, ticket.data, ticket.author) == (
        told["id"],
        {"key": "lr_factor", "value": 0.5},
        "a-tool at 127.0.0.1",
    )


def test_a_client_can_wait_until_a_command_is_applied(job: Served) -> None:
    thread = apply_commands(job, step=17)
    with job.client() as client:
        told = client.post("/jobs/job/control", json={"command": "save_checkpoint", "wait": 30}).json()
        ticket = client.get(f"/jobs/job/commands/{told['id']}").json()
    thread.join()
    assert told["ticket"] == ticket
    assert (ticket["status"], ticket["step"], ticket["result"]) == ("applied", 17, {"saved": True})


def test_a_wait_ends_with_a_command_that_is_still_queued(job: Served) -> None:
    with job.client() as client:
        told = client.post("/jobs/job/control", json={"command": "save_checkpoint", "wait": 0.05}).json()
        assert told["ticket"]["status"] == "queued"
        assert client.get(f"/jobs/job/commands/{told['id']}?wait=0.05").json()["status"] == "queued"
        assert client.get("/jobs/job/commands/unknown").status_code == 404


def test_unknown_commands_bad_data_and_refusals_say_why(job: Served) -> None:
    with job.client() as client:
        unknown = client.post("/jobs/job/control", json={"command": "save"})
        assert (unknown.status_code, "Unknown command: 'save'" in unknown.json()["error"]) == (400, True)
        assert "save_checkpoint" in unknown.json()["valid_commands"]
        bad = client.post("/jobs/job/control", json={"command": "set", "data": {"key": "lr_factor", "value": "x"}})
        assert (bad.status_code, bad.json()["error"]) == (400, "set: value must be a number, got 'x'.")
        assert "valid_commands" not in bad.json()
        assert client.post("/jobs/job/control", json={"command": "own", "data": {"any": 1}}).status_code == 200
        job.inbox.close("training has ended.")
        refused = client.post("/jobs/job/control", json={"command": "abort"})
        assert (refused.status_code, refused.json()["error"]) == (409, "abort: training has ended.")


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"[]", 400),
        (b"", 400),
        (b'{"command": "own", "data": {"a": [NaN]}}', 400),
        (b'{"command": "own", "data": {"a": 1e400}}', 400),
        (b'{"command": "status", "wait": 61}', 400),
        (b'{"command": "status", "wait": -1}', 400),
        (b'{"command": "status", "wait": true}', 400),
        (b'{"command": "status", "wait": NaN}', 400),
        (b'{"command": ["status"]}', 400),
        (b'{"command": "status", "data": []}', 400),
        (b'{"command": "rollback", "step": 4}', 400),
        (b'{"command": "own", "data": {"a": "\\ud800"}}', 400),
        (b'{"command": "own", "data": ' + b'{"a":' * 50 + b"1" + b"}" * 51, 400),
        (b"[" * 60_000, 400),
        (b'{"command": ' + b"9" * 60_000 + b"}", 400),
        (b"\xff\xfe", 400),
        (b'{"command": "status"}' + b" " * 65_536, 413),
    ],
)
def test_a_body_that_is_not_a_command_is_refused(job: Served, body: bytes, status: int) -> None:
    with job.client() as client:
        answer = client.post("/jobs/job/control", content=body, headers={"Content-Type": "application/json"})
        assert (answer.status_code, next(iter(answer.json()))) == (status, "error")
    assert not job.inbox.has_new


def test_only_json_is_read(job: Served) -> None:
    with job.client() as client:
        for content_type in ("text/plain", "application/x-www-form-urlencoded", ""):
            answer = client.post(
                "/jobs/job/control", content=b'{"command": "abort"}', headers={"Content-Type": content_type}
            )
            assert answer.status_code == 415
    assert not job.inbox.has_new


def test_the_status_has_the_newest_metrics_and_the_state(job: Served) -> None:
    job.feed.add_record({"step": 3, "loss": float("nan"), "timestamp": 5.0})
    job.feed.update(status="paused", global_step=4)
    with job.client() as client:
        status = client.get("/jobs/job/status").json()
    assert abs(status.pop("timestamp") - time.time()) < 60
    assert status == {"job_id": "job", "step": 3, "loss": None, "status": "paused", "global_step": 4}


def test_curves_are_chosen_and_downsampled(job: Served) -> None:
    for step in range(5_000):
        job.feed.add_record({"step": step, "loss": float(step), "lr": 0.1, "timestamp": 0.0})
    with job.client() as client:
        told = client.get("/jobs/job/metrics?names=loss,unknown&points=100&since_step=10").json()
        assert (told["names"], told["num_points"], list(told["series"])) == (["loss", "lr"], 5_000, ["loss"])
        assert 20 < len(told["series"]["loss"]["step"]) <= 100
        assert told["series"]["loss"]["step"][0] == 11
        for query in ("points=9", "points=10001", "points=x", "points=1e2", "points=nan", "since_step=1.5"):
            assert client.get(f"/jobs/job/metrics?{query}").status_code == 400


def test_events_are_listed(job: Served) -> None:
    job.feed.add_event("save", {"step": 1})
    job.feed.add_event("decision", {"value": float("inf")})
    with job.client() as client:
        assert [one["kind"] for one in client.get("/jobs/job/events?stream=0").json()["events"]] == ["save", "decision"]
        assert client.get("/jobs/job/events?stream=0&after=1").json()["events"][0]["data"] == {"value": None}
        assert client.get("/jobs/job/events?stream=0&kinds=save,end").json()["events"][0]["id"] == 1
        assert client.get("/jobs/job/events?stream=0&kinds=saves").status_code == 400
        assert client.get("/jobs/job/events?stream=2").status_code == 400


def test_events_are_streamed_until_the_job_ends_and_continued_after_the_last_one_seen(job: Served) -> None:
    job.feed.add_event("save", {"step": 1, "text": "two\nlines"})
    with job.client() as client:
        with client.stream("GET", "/jobs/job/events") as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            lines = answer.iter_lines()
            assert [next(lines) for _ in range(4)][2:] == ["id: 1", "event: save"]
            data = json.loads(next(lines).removeprefix("data: "))
            assert (data["step"], data["text"]) == (1, "two\nlines")
            job.feed.add_event("decision", {})
            job.feed.add_event("end", {"reason": "completed"})
            assert [line for line in lines if line.startswith("event")] == ["event: decision", "event: end"]
        rest = client.get("/jobs/job/events?after=1", headers={"Last-Event-ID": "2"}).text
        assert [line for line in rest.splitlines() if line.startswith("id")] == ["id: 3"]
        assert client.get("/jobs/job/events?after=3").status_code == 204  # a browser stops to ask


def test_there_are_not_too_many_streams_and_a_closed_one_makes_room(job: Served) -> None:
    connections = [job.connect() for _ in range(16)]
    request = b"GET /jobs/job/events HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer " + b"5f" * 32 + b"\r\n\r\n"
    for connection in connections:
        connection.sendall(request)
        assert b"retry" in received(connection, b"retry")
    with job.client() as client:
        assert client.get("/jobs/job/events").status_code == 503
        connections.pop().close()
        until(lambda: job.raw_status(request) != 503)
    for connection in connections:
        connection.close()


def test_prometheus_reads_the_newest_numbers(job: Served) -> None:
    job.feed.add_record({"step": 7, "loss": 2.5, "grad_norm": float("inf"), "memory": [1, 2], "text": "no", "a-b": 1})
    job.feed.update(status="paused", global_step=7)
    with job.client() as client:
        answer = client.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    lines = answer.text.splitlines()
    assert {line for line in lines if not line.startswith("#")} == {
        'onstep_step{job_id="job"} 7.0',
        'onstep_loss{job_id="job"} 2.5',
        'onstep_grad_norm{job_id="job"} +Inf',
        'onstep_memory{job_id="job",rank="0"} 1.0',
        'onstep_memory{job_id="job",rank="1"} 2.0',
        'onstep_a_b{job_id="job"} 1.0',
        'onstep_up{job_id="job"} 1.0',
        'onstep_paused{job_id="job"} 1.0',
    }
    assert lines.count("# TYPE onstep_memory gauge") == 1


def test_all_jobs_of_the_user_are_listed_without_their_tokens(job: Served) -> None:
    with Registration("other") as entry:
        entry.publish(JobInfo.of_this_process("other", port=1), "do not show")
        with job.client() as client:
            answer = client.get("/jobs")
    assert [(one["job_id"], one["alive"], one["is_here"]) for one in answer.json()["jobs"]] == [("other", True, True)]
    assert "do not show" not in answer.text


def test_an_unknown_job_is_answered_with_those_there_are(job: Served) -> None:
    with job.client() as client:
        for path in ("status", "metrics", "events", "commands/1"):
            answer = client.get(f"/jobs/other/{path}")
            assert (answer.status_code, answer.json()["jobs"]) == (404, ["job"])
        assert client.post("/jobs/other/control", json={"command": "abort"}).status_code == 404


def test_a_bug_in_a_handler_is_answered_and_logged_without_its_text(
    registry: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def jobs() -> dict[str, LiveJob]:
        raise ZeroDivisionError("private")

    server = ControlServer(build_app(jobs, access=Access(None), listed=describe_jobs, title="broken"), port=0)
    server.start()
    answer = httpx.get(f"http://127.0.0.1:{server.port}/jobs/job/status", timeout=PATIENCE)
    again = httpx.get(f"http://127.0.0.1:{server.port}/openapi.json", timeout=PATIENCE)
    server.stop()
    assert (answer.status_code, answer.json()) == (500, {"error": "ZeroDivisionError"})
    assert again.status_code == 200
    assert "A request failed" in caplog.text


def test_the_page_and_its_library_need_no_token(job: Served) -> None:
    with job.stranger() as client:
        assert client.get("/").status_code == 200
        library = client.get("/static/chart.js")
        assert (library.status_code, library.headers["content-type"]) == (200, "text/javascript; charset=utf-8")
        again = client.get("/static/chart.js", headers={"If-None-Match": library.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert client.get("/static/unknown.js").status_code == 404
        policy = library.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "http" not in policy
        assert "frame-ancestors 'none'" in policy
        assert library.headers["x-content-type-options"] == "nosniff"
        assert library.headers["referrer-policy"] == "no-referrer"


def test_a_taken_port_and_an_impossible_one_are_refused_with_a_remedy(job: Served) -> None:
    for port, text in ((job.server.port, "is in use; give another"), (70_000, "must be 0 to 65535, got 70000")):
        with pytest.raises(ConfigError, match=text):
            ControlServer(build_app(dict, access=job.access, listed=list, title=""), port=port)
    with pytest.raises(ConfigError, match="cannot be bound"):
        ControlServer(build_app(dict, access=job.access, listed=list, title=""), host="192.0.2.1", port=0)


def test_without_a_port_the_first_free_one_from_8900_is_used(registry: Path) -> None:
    with served("a", port=None) as first, served("b", port=None) as second:
        assert 8900 <= first.server.port < second.server.port < 9000


def test_a_unix_socket_serves_its_owner_without_a_token(registry: Path) -> None:
    with Registration("job") as entry:
        with served(token=None, uds=entry.socket_path) as job:
            assert entry.socket_path.stat().st_mode & 0o777 == 0o600
            with httpx.Client(
                transport=httpx.HTTPTransport(uds=str(entry.socket_path)), base_url="http://any"
            ) as client:
                assert client.post("/jobs/job/control", json={"command": "status"}).status_code == 200
            assert job.inbox.take()[0].author == "python-httpx"
        assert not entry.socket_path.exists()


def test_a_unix_socket_of_a_killed_job_is_replaced_and_a_long_path_refused(registry: Path, tmp_path: Path) -> None:
    with Registration("job") as entry:
        app = build_app(dict, access=Access(None, None), listed=list, title="")
        left = ControlServer(app, uds=entry.socket_path)
        with served(token=None, uds=entry.socket_path):
            pass
        left.stop()
    with pytest.raises(ConfigError, match=r"may have 100 bytes.*ONSTEP_REGISTRY.*uds=False"):
        ControlServer(app, uds=tmp_path / ("x" * 100))


def test_watchers_see_how_the_job_ended_although_the_server_stops_at_once(registry: Path) -> None:
    with served() as job, job.client() as client, client.stream("GET", "/jobs/job/events") as answer:
        lines = answer.iter_lines()
        next(lines)
        job.feed.add_event("end", {"reason": "completed"})
        job.server.stop()
        assert "event: end" in list(lines)


def test_stop_ends_open_streams_and_frees_the_port(registry: Path) -> None:
    with served() as job, job.client() as client, client.stream("GET", "/jobs/job/events") as answer:
        lines = answer.iter_lines()
        next(lines)
        job.server.stop()
        with pytest.raises(httpx.HTTPError):
            list(lines)
        with pytest.raises(httpx.ConnectError):
            httpx.get(job.url, timeout=PATIENCE)
        assert not [thread for thread in threading.enumerate() if thread.name == "onstep-control-server"]
        job.server.stop()
        ControlServer(build_app(dict, access=job.access, listed=list, title=""), port=job.server.port).stop()
