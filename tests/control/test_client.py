"""The Python client against a real server over real sockets."""

from __future__ import annotations

import gzip
import http.server
import json
import math
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import onstep.control
from onstep.commands import COMMANDS
from onstep.control import (
    ControlError,
    ControlResponse,
    HTTPTrainerControlClient,
    JobInfo,
    get_job_status,
    graceful_stop,
    list_jobs,
    list_jobs_remote,
)
from onstep.control.client.event_stream import parse_events
from onstep.control.commands import CommandRefusedError
from onstep.control.inbox import Ticket
from onstep.control.registry import registry_root
from onstep.errors import ConfigError
from tests.support.forked_processes import held_port
from tests.support.steered_job import SteeredJob, commands_of, steered_job
from tests.support.waiting import until


@pytest.fixture(autouse=True)
def _own_registry(registry: Path) -> None:
    """Each test has a registry of its own."""


@pytest.fixture
def job() -> Iterator[SteeredJob]:
    with steered_job() as found:
        yield found


def registered(info: JobInfo, token: str = "secret-of-the-job") -> None:
    """An entry as a process that is gone leaves it."""
    directory = registry_root() / info.job_id
    directory.mkdir(parents=True, mode=0o700)
    (directory / "endpoint.json").write_text(json.dumps(info.to_dict()))
    (directory / "auth_token").write_text(token)


@contextmanager
def raw_server(answer: bytes, drip: bytes = b"") -> Iterator[tuple[int, list[bytes]]]:
    """A port that answers every connection with the same bytes, and what was sent to it; `drip` follows for ever."""
    received: list[bytes] = []
    listener, is_over = socket.create_server(("127.0.0.1", 0)), threading.Event()

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                received.append(connection.recv(65536))
                connection.sendall(answer)
                with suppress(OSError):  # the client has left, or the test is over
                    while drip and not is_over.wait(0.02):
                        connection.sendall(drip)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1], received
    finally:
        is_over.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


SENT: list[tuple[str, tuple[Any, ...], str, dict[str, Any]]] = [
    ("graceful_stop", (), "graceful_stop", {}),
    ("save_checkpoint", (), "save_checkpoint", {}),
    ("save_and_stop", (), "save_and_stop", {}),
    ("abort", (), "abort", {}),
    ("evaluate", (), "evaluate", {}),
    ("pause", (), "pause", {}),
    ("resume", (), "resume", {}),
    ("set_value", ("lr_factor", 0.5), "set", {"key": "lr_factor", "value": 0.5}),
    ("set_value", ("lr_factor", None), "set", {"key": "lr_factor", "value": None}),
    ("skip_batch", (3,), "skip_batch", {"count": 3}),
    ("rollback", (40,), "rollback", {"step": 40, "lr_factor": 1.0}),
    ("generate", (["def "],), "generate", {"prompts": ["def "], "max_new_tokens": 64}),
    ("generate", ("def ",), "generate", {"prompts": ["def "], "max_new_tokens": 64}),
    ("profile", (), "profile", {"steps": 3}),
    ("stacks", (), "stacks", {}),
]


def test_each_function_sends_its_command(job: SteeredJob) -> None:
    for function, words, _, _ in SENT:
        response = getattr(onstep.control, function)("job_a", *words, wait=60)
        assert response.success, response.message
        assert response.data is not None
        assert (response.data["status"], response.data["step"]) == ("applied", 7)
    assert commands_of(job) == [(command, data) for _, _, command, data in SENT]
    assert {function for function, *_ in SENT} == {one.function for one in COMMANDS.values() if one.verb}


def test_a_command_returns_when_it_is_queued_unless_it_waits(job: SteeredJob) -> None:
    job.is_busy = True
    response = graceful_stop("job_a")
    assert (response.success, response.message) == (True, "Command graceful_stop queued for execution")
    assert response.timestamp == pytest.approx(time.time(), abs=60)
    assert response.data is not None
    late = onstep.control.wait("job_a", response.data["id"], timeout=0.05)
    assert (late.success, "still queued" in late.message) == (False, True)
    job.is_busy = False
    applied = onstep.control.wait("job_a", response.data["id"])
    assert (applied.success, applied.message) == (True, "graceful_stop: applied at step 7")


def test_a_client_that_waits_without_limit_asks_again(job: SteeredJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onstep.control.client.http_client._MOST_WAIT_SECONDS", 0.02)
    job.is_busy = True
    looked, get = [], job.inbox.get

    def busy_for_ten_looks(ticket_id: str) -> Ticket | None:
        looked.append(ticket_id)
        job.is_busy = len(looked) < 10
        return get(ticket_id)

    monkeypatch.setattr(job.inbox, "get", busy_for_ten_looks)
    response = onstep.control.generate("job_a", ["def "], wait=math.inf)
    assert response.data is not None
    assert response.data["result"] == [{"prompt": "def ", "text": "f():\n    return 1"}]


def test_a_refused_command_says_why() -> None:
    def check(command: str, data: dict[str, Any]) -> None:
        raise CommandRefusedError("rollback: there is no checkpoint")

    with steered_job(check=check):
        response = onstep.control.rollback("job_a")
    assert (response.success, response.message) == (False, "HTTP 409: rollback: there is no checkpoint")


def test_a_command_that_is_refused_while_it_waits_says_why(job: SteeredJob) -> None:
    job.is_busy = True

    def end() -> None:
        until(lambda: job.inbox.has_new)
        job.end()

    threading.Thread(target=end).start()
    response = onstep.control.evaluate("job_a", wait=60)
    assert (response.success, response.message) == (False, "training has ended")


def test_a_command_that_does_not_exist_or_fit_is_an_unsuccessful_response(job: SteeredJob) -> None:
    unknown = onstep.control.send_command("job_a", "evalute")
    assert unknown.message.startswith("HTTP 400: Unknown command: 'evalute'. Did you mean 'evaluate'?")
    bad = onstep.control.skip_batch("job_a", -1)
    assert (bad.success, "count must be an integer >= 1" in bad.message) == (False, True)
    for data in ([], "", 0, False, ["step", 4]):
        refused = onstep.control.send_command("job_a", "rollback", data)  # type: ignore[arg-type]
        assert (refused.success, "data must be an object" in refused.message) == (False, True)
    assert not job.applied
    for wait in ("x", -1, float("nan"), True):
        refused = onstep.control.send_command("job_a", "pause", wait=wait)  # type: ignore[arg-type]
        assert refused.message == f"wait must be a number of seconds >= 0, or None, got {wait!r}."
    assert onstep.control.send_command("job_a", "celebrate", wait=60).success
    with pytest.raises(ConfigError, match="must be JSON"):
        onstep.control.set_value("job_a", "lr_factor", math.nan)


def test_a_wrong_or_missing_token_shows_what_the_server_says(job: SteeredJob) -> None:
    for token, hint in (("wrong", "not that of this server"), (None, "no token was given")):
        client = HTTPTrainerControlClient("127.0.0.1", job.port, token)
        response = client.pause("job_a")
        assert not response.success
        assert response.message.startswith("HTTP 401: authentication required")
        assert hint in response.message
        assert client.get_status("job_a") == {
            "error": response.message,
            "job_id": "job_a",
            "status": "unknown",
        }
    assert job.applied == []


def test_an_unknown_job_is_an_error_that_names_the_nearest(job: SteeredJob) -> None:
    with pytest.raises(ConfigError, match=r"there is no job 'job_b'; registered: job_a\. Did you mean 'job_a'\?"):
        graceful_stop("job_b")
    with pytest.raises(ValueError, match="there is no job"):
        get_job_status("../job_a")


def test_a_remote_server_names_the_jobs_it_has(job: SteeredJob) -> None:
    response = HTTPTrainerControlClient("127.0.0.1", job.port, job.token).pause("job_b")
    assert (response.success, "404" in response.message, "job_a" in response.message) == (False, True, True)


def test_the_token_is_read_again_for_each_request() -> None:
    client = HTTPTrainerControlClient()
    for token in ("first", "second"):
        with steered_job(token=token):
            assert client.pause("job_a", wait=60).success


def test_a_job_on_a_unix_socket_is_reached() -> None:
    with steered_job(uds=True) as job:
        assert onstep.control.pause("job_a", wait=60).success
        assert commands_of(job) == [("pause", {})]
        with pytest.raises(ControlError, match="Unix socket"):
            HTTPTrainerControlClient().login_link("job_a")


def test_a_dead_jobs_token_is_not_sent_to_whoever_has_its_port() -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    with raw_server(b"") as (port, received):
        registered(JobInfo("job_dead", "127.0.0.1", port, dead.pid, time.time()))
        response = onstep.control.pause("job_dead")
    assert (response.success, received) == (False, [])
    assert response.message == (
        f"job_dead has ended: its process {dead.pid} is gone; `onstep control cleanup` removes its entry."
    )


def test_the_token_of_another_machines_job_is_not_sent_to_this_ones_loopback() -> None:
    with raw_server(b"") as (port, received):
        registered(JobInfo("job_far", "127.0.0.1", port, 1, time.time(), hostname="node7.example"))
        response = onstep.control.pause("job_far")
    assert (response.success, received) == (False, [])
    assert f"ssh -L {port}:127.0.0.1:{port} node7.example" in response.message
    assert f"--remote 127.0.0.1:{port}" in response.message


def test_redirects_are_not_followed() -> None:
    with raw_server(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}") as (other, received):
        to = f"HTTP/1.1 307 Go\r\nLocation: http://127.0.0.1:{other}/\r\nContent-Length: 0\r\n\r\n".encode()
        with raw_server(to) as (port, _):
            response = HTTPTrainerControlClient("127.0.0.1", port, "secret").pause("job_a")
    assert (response.success, received) == (False, [])
    assert response.message.startswith("HTTP 307")


def test_proxies_of_the_environment_are_not_used(job: SteeredJob, monkeypatch: pytest.MonkeyPatch) -> None:
    with raw_server(b"") as (port, received):
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{port}")
        assert onstep.control.pause("job_a", wait=60).success
    assert received == []


def test_what_is_no_control_server_is_named() -> None:
    with raw_server(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello") as (port, _):
        response = HTTPTrainerControlClient("127.0.0.1", port).pause("job_a")
    assert response.message == f"the answer of http://127.0.0.1:{port} is not a JSON object; is it a control server?"


def test_a_server_that_cannot_be_reached_is_named() -> None:
    with held_port() as port:
        response = HTTPTrainerControlClient("127.0.0.1", port).pause("job_a")
    assert (response.success, f"cannot reach http://127.0.0.1:{port}" in response.message) == (False, True)


def test_a_request_names_the_program_and_its_version(job: SteeredJob) -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
    with raw_server(answer) as (port, received):
        HTTPTrainerControlClient("127.0.0.1", port, "secret").pause("a b/c")
    assert b"\r\nUser-Agent: onstep/" in received[0]
    assert b"\r\nAuthorization: Bearer secret\r\n" in received[0]
    assert received[0].startswith(b"POST /jobs/a%20b%2Fc/control HTTP/1.1\r\n")


def test_jobs_are_listed_newest_first() -> None:
    registered(JobInfo("job_old", "127.0.0.1", 1, 1, 100.0))
    with steered_job() as job:
        assert [info.job_id for info in list_jobs()] == ["job_a", "job_old"]
        assert list_jobs()[0] == job.info
        assert list_jobs_remote("127.0.0.1", job.port, job.token) == list_jobs()
        with pytest.raises(ControlError, match="HTTP 401"):
            list_jobs_remote("127.0.0.1", job.port)


def test_status_and_metrics_are_what_the_job_shows(job: SteeredJob) -> None:
    for loss in (3.0, 2.0):
        job.log(loss=loss)
    status = get_job_status("job_a")
    assert (status["loss"], status["global_step"], status["status"]) == (2.0, 9, "running")
    history = onstep.control.metrics("job_a", ["loss"], since_step=8)
    assert history["series"]["loss"]["value"] == [2.0]


def test_events_arrive_until_the_job_ends(job: SteeredJob) -> None:
    job.log(loss=3.0)
    job.feed.add_event("save", {"step": 8})
    arrived = onstep.control.events("job_a")
    first, second = next(arrived), next(arrived)
    assert (first.kind, first.data["loss"], second.kind) == ("metrics", 3.0, "save")
    job.end()
    assert [(event.kind, event.data["reason"]) for event in arrived] == [("end", "completed")]
    assert list(onstep.control.events("job_a", after=3)) == []
    assert [event.id for event in onstep.control.events("job_a", kinds=["save"])] == [2, 3]


def test_events_continue_after_a_lost_connection_where_they_were() -> None:
    with steered_job() as job:
        job.log(loss=3.0)
        arrived = onstep.control.events("job_a")
        assert next(arrived).data["loss"] == 3.0
        feed, port = job.feed, job.port
        job.server.stop()
        feed.add_event("save", {"step": 8})
    with steered_job(feed=feed, port=port) as again:
        again.end()
        assert [event.kind for event in arrived] == ["save", "end"]


def test_the_stream_of_a_job_that_is_gone_ends_with_an_error() -> None:
    with steered_job() as job:
        job.log(loss=3.0)
        arrived = onstep.control.events("job_a")
        next(arrived)
    with pytest.raises(ConfigError, match="there is no job 'job_a'"):
        next(arrived)


def test_past_events_are_read_page_by_page(job: SteeredJob) -> None:
    for _ in range(700):
        job.feed.add_event("sample", {"text": "x"})
    past = HTTPTrainerControlClient().past_events("job_a", kinds=["sample"])
    assert [event.id for event in past] == list(range(1, 701))


def test_a_stream_is_parsed_wherever_it_is_cut() -> None:
    text = (
        ": hello\r\n\r\nretry: 2000\n\n"
        'id: 4\nevent: sample\ndata: {"timestamp": 1.5, "text": "a\u2028ö\u0085"}\n\n'
        "event: nonsense\ndata: {\n\n"
        'id: 5\nevent: end\ndata: {"timestamp": 2}\n\n'
        "id: 6\nevent: cut"
    )
    content = text.encode()
    for size in (1, 2, 7, len(content)):
        chunks = [content[start : start + size] for start in range(0, len(content), size)]
        events = list(parse_events(chunks))
        assert [(event.id, event.kind, event.timestamp) for event in events] == [(4, "sample", 1.5), (5, "end", 2.0)]
        assert events[0].data["text"] == "a\u2028ö\u0085"


def test_a_login_link_works_once_and_has_no_token(job: SteeredJob) -> None:
    link = HTTPTrainerControlClient().login_link("job_a")
    assert str(job.token) not in link
    place, _, path = link.removeprefix("http://").partition("/")
    codes = []
    for _ in range(2):
        connection = http.client.HTTPConnection(place)
        connection.request("GET", f"/{path}")
        codes.append(connection.getresponse().status)
        connection.close()
    assert codes == [303, 401]


def test_address_and_token_must_fit_together() -> None:
    with pytest.raises(ConfigError, match="host and port"):
        HTTPTrainerControlClient("127.0.0.1")
    with pytest.raises(ConfigError, match="token is for a server"):
        HTTPTrainerControlClient(token="secret")


def test_a_response_has_the_time_of_its_making_unless_given() -> None:
    assert ControlResponse(True, "", timestamp=5.0).timestamp == 5.0
    assert ControlResponse(True, "").timestamp == pytest.approx(time.time(), abs=60)


def test_the_missing_extra_is_named(job: SteeredJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(ImportError, match=r"pip install 'onstep\[control\]'"):
        onstep.control.pause("job_a")


def test_importing_the_package_imports_none_of_its_libraries() -> None:
    code = (
        "import sys, onstep.control; onstep.control.set_value;"
        "sys.exit(bool({'torch', 'httpx', 'psutil', 'platformdirs', 'starlette', 'uvicorn'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_connection_does_not_show_its_token() -> None:
    from onstep.control.client.connection import Connection

    assert "secret" not in repr(Connection("http://127.0.0.1:1", token="secret"))


@pytest.mark.parametrize("body", [b"[]", b"{}", b"null", b"[" * 100_000, b'{"jobs": [1, {}], "path": "@elsewhere/x"}'])
def test_an_answer_that_is_none_of_ours_is_one_line(body: bytes) -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    with raw_server(answer) as (port, _):
        client = HTTPTrainerControlClient("127.0.0.1", port)
        assert "is it a control server?" in client.pause("job_a").message
        for ask in (client.past_events, client.login_link):
            with pytest.raises(ControlError, match="is it a control server"):
                ask("job_a")
        if b"jobs" in body:
            assert client.list_jobs() == []
        else:
            with pytest.raises(ControlError, match="is it a control server"):
                client.list_jobs()


@pytest.mark.parametrize(
    ("answer", "drip"),
    [
        (b"HTTP/1.1 200 OK\r\n", b"X: y\r\n"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n{", b" "),
        (b"HTTP/1.1 400 No\r\nContent-Length: 1000000\r\n\r\n{", b" "),
    ],
)
def test_an_answer_that_only_drips_is_given_up(answer: bytes, drip: bytes) -> None:
    with raw_server(answer, drip) as (port, _):
        response = HTTPTrainerControlClient("127.0.0.1", port, timeout=0.3).pause("job_a")
    assert not response.success
    assert "did not answer within 0.3 s" in response.message


def test_a_compressed_answer_is_not_expanded() -> None:
    body = gzip.compress(b" " * 100_000_000)
    head = b"HTTP/1.1 %b\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n"
    for status in (b"200 OK", b"400 No"):
        with raw_server(head % (status, len(body)) + body) as (port, received):
            client = HTTPTrainerControlClient("127.0.0.1", port)
            tracemalloc.start()
            messages = [client.pause("job_a").message, client.get_status("job_a")["error"]]
            with pytest.raises(ControlError, match="compressed"):
                list(client.events("job_a"))
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert all("is compressed ('gzip')" in one for one in messages)
        assert b"accept-encoding: identity" in received[0].lower()
        assert peak < 10_000_000


@pytest.mark.parametrize("page", [[{"id": 0}], [{"id": 1, "kind": "end", "timestamp": 0, "data": {}}], [1]])
def test_pages_of_events_that_go_round_end_with_an_error(page: list[Any]) -> None:
    body = json.dumps({"events": page}).encode()
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    with raw_server(answer) as (port, _), pytest.raises(ControlError, match="events in order"):
        HTTPTrainerControlClient("127.0.0.1", port).past_events("job_a")


def test_the_names_of_a_remote_machine_cannot_control_the_terminal() -> None:
    escape = "\x1b[2J"
    jobs = [
        {"job_id": f"a{escape}"},
        {"job_id": "job_a", "host": escape, "output_dir": f"/runs/{escape}", "uds": escape},
    ]
    body = json.dumps({"jobs": jobs}).encode()
    with raw_server(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)) as (port, _):
        (found,) = HTTPTrainerControlClient("127.0.0.1", port).described_jobs()
    assert found["output_dir"] == "/runs/?[2J"
    assert "\x1b" not in "".join(str(value) for value in found.values())


def test_what_a_server_says_cannot_control_the_terminal() -> None:
    body = b'{"error": "\\u001b[2J' + b"x" * 5000 + b'"}'
    with raw_server(b"HTTP/1.1 400 No\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)) as (port, _):
        message = HTTPTrainerControlClient("127.0.0.1", port).pause("job_a").message
    assert message.startswith("HTTP 400: ?[2Jxxx")
    assert len(message) < 1100


@pytest.mark.parametrize("token", ["", "two words", "a\r\nX-Other: b", "schl\u00fcssel"])
def test_a_token_that_cannot_be_one_is_refused_and_not_repeated(token: str) -> None:
    with pytest.raises(ConfigError, match="single word of ASCII") as raised:
        HTTPTrainerControlClient("127.0.0.1", 1, token)
    assert not token or token not in str(raised.value)
