"""Who is refused by the control server, and what it survives; over raw sockets where a client library is too polite."""

from __future__ import annotations

import hmac
import json
import logging
import os
import random
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import psutil
import pytest

from onstep.control.registry import JobInfo, Registration
from onstep.http.access import Access, names_of
from tests.support.control_server import TOKEN, Served, received, status_of
from tests.support.waiting import PATIENCE, until

BEARER = f"Authorization: Bearer {TOKEN}\r\n".encode()


@pytest.fixture(autouse=True)
def a_leaked_token_fails(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No test here may log the token, at any level, by any logger of ours, asyncio's or uvicorn's."""
    with ExitStack() as levels:
        for name in ("onstep", "asyncio", "uvicorn", "uvicorn.error", "uvicorn.access"):
            levels.enter_context(caplog.at_level(logging.DEBUG, name))
        yield
        ours = [one for one in caplog.records if not one.name.startswith(("httpx", "httpcore"))]
        assert TOKEN not in " ".join(one.getMessage() + str(one.exc_info) for one in ours)
        assert not [one for one in ours if one.name.startswith("uvicorn")]


def works(job: Served) -> bool:
    """Whether the server answers a normal request."""
    answer = httpx.get(f"{job.url}/jobs/job/status", headers={"Authorization": f"Bearer {TOKEN}"}, timeout=PATIENCE)
    return answer.status_code == 200


ROUTES = [
    ("GET", "/jobs"),
    ("GET", "/jobs/job/status"),
    ("GET", "/jobs/job/events"),
    ("GET", "/jobs/job/metrics"),
    ("GET", "/jobs/job/commands/1"),
    ("POST", "/jobs/job/control"),
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
    ("POST", "/login-links"),
    ("POST", "/logout"),
    ("GET", "/unknown"),
    ("DELETE", "/jobs"),
    ("GET", "/jobs/../jobs"),
    ("OPTIONS", "/jobs/job/control"),
]


@pytest.mark.parametrize(
    "authorization",
    [
        "",
        "Authorization: Bearer\r\n",
        "Authorization: Bearer \r\n",
        "Authorization: Bearer wrong\r\n",
        f"Authorization: Bearer {TOKEN[:-1]}\r\n",
        f"Authorization: Bearer {TOKEN}x\r\n",
        f"Authorization: Bearer {TOKEN * 100}\r\n",
        f"Authorization: Bearer {TOKEN.upper()}\r\n",
        f"Authorization: Basic {TOKEN}\r\n",
        f"Authorization: {TOKEN}\r\n",
        f"Authorization: Bearer wrong\r\nAuthorization: Bearer {TOKEN}\r\n",
        f"Authorization: Bearer {TOKEN}\r\nAuthorization: Bearer wrong\r\n",
        "Authorization: Bearer \xe4\xff\r\n",
        f"Cookie: onstep_session={TOKEN}\r\n",
        f"X-Token: {TOKEN}\r\n",
    ],
)
def test_a_missing_wrong_truncated_or_oversized_token_is_refused(job: Served, authorization: str) -> None:
    for method, path in ROUTES:
        request = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{authorization}Connection: close\r\n\r\n"
        answer = job.raw(request.encode("latin-1"))
        assert status_of(answer) == 401, (method, path)
        assert b'www-authenticate: Bearer realm="onstep"' in answer
        assert answer.endswith(b'{"detail": "authentication required"}')


def test_a_token_in_the_url_is_worth_nothing(job: Served) -> None:
    with job.stranger() as client:
        assert client.get(f"/jobs?token={TOKEN}&access_token={TOKEN}").status_code == 401


def test_tokens_are_compared_in_constant_time_and_oversized_ones_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((a, b)))
    access = Access("secret")
    for given in (b"Bearer secre", b"Bearer " + b"x" * 4096, b"Bearer " + b"x" * 4097):
        access.is_bearer(given)
    assert [(len(a), b) for a, b in compared] == [(5, b"secret"), (4096, b"secret")]


def test_the_token_is_in_no_command_line_and_no_public_file(job: Served, registry: Path) -> None:
    with Registration("job") as entry:
        entry.publish(JobInfo.of_this_process("job", port=job.server.port), TOKEN)
        holders = [path for path in entry.directory.iterdir() if TOKEN in path.read_text()]
        assert [(path.name, path.stat().st_mode & 0o777) for path in holders] == [("auth_token", 0o600)]
    assert TOKEN not in " ".join(psutil.Process().cmdline())
    assert TOKEN not in " ".join(os.environ.values())


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8900",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "",
        "[::2]",
        "a@localhost",
    ],
)
def test_a_foreign_host_is_refused_even_with_the_token(job: Served, host: str) -> None:
    request = f"GET /jobs HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n".encode() + BEARER + b"\r\n"
    assert status_of(job.raw(request)) == 421


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:{port}", "127.0.0.1:{port}", "[::1]:{port}", "localhost:9000"]
)
def test_the_names_of_the_loopback_are_accepted_with_any_port_as_behind_a_tunnel(job: Served, host: str) -> None:
    head = f"GET /jobs HTTP/1.1\r\nHost: {host.format(port=job.server.port)}\r\nConnection: close\r\n"
    assert status_of(job.raw(head.encode() + BEARER + b"\r\n")) == 200


def test_a_request_without_a_host_or_with_two_is_refused(job: Served) -> None:
    closing = BEARER + b"Connection: close\r\n\r\n"
    assert status_of(job.raw(b"GET /jobs HTTP/1.0\r\n" + closing)) == 421
    assert status_of(job.raw(b"GET /jobs HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n" + closing)) in (400, 421)


def test_a_server_on_all_addresses_has_the_names_of_the_machine() -> None:
    assert {"localhost", "127.0.0.1", socket.gethostname()} <= names_of("0.0.0.0")
    assert names_of("10.1.2.3") == {"localhost", "127.0.0.1", "::1", "10.1.2.3"}


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://localhost:1", "file://", "", "https://evil"])
def test_a_foreign_origin_is_refused_on_every_route(job: Served, origin: str) -> None:
    for method, path in (*ROUTES, ("GET", "/"), ("POST", "/login"), ("GET", "/static/chart.js")):
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost:{job.server.port}\r\nOrigin: {origin}\r\n"
        answer = job.raw(head.encode() + BEARER + b"Connection: close\r\n\r\n")
        assert status_of(answer) == 403, (method, path)
        assert b"access-control-allow" not in answer.lower()


def log_in(client: httpx.Client, token: str = TOKEN) -> httpx.Response:
    return client.post("/login", json={"token": token})


def test_a_browser_gets_a_cookie_for_the_token(job: Served) -> None:
    with job.stranger() as client:
        assert log_in(client, "wrong").status_code == 401
        assert client.get("/jobs").status_code == 401
        admitted = log_in(client)
        cookie = admitted.headers["set-cookie"]
        assert admitted.status_code == 204
        assert {"HttpOnly", "Path=/", "SameSite=strict"} <= set(cookie.split("; "))
        assert TOKEN not in cookie
        assert client.get("/jobs").status_code == 200
        same_site = {"Origin": job.url}
        assert client.post("/logout", headers=same_site).status_code == 204
        assert client.get("/jobs", headers={"Cookie": cookie.split(";")[0]}).status_code == 401


def test_a_cookie_alone_does_not_send_a_command(job: Served) -> None:
    command = {"command": "abort"}
    with job.stranger() as client:
        log_in(client)
        assert client.post("/jobs/job/control", json=command).status_code == 401
        for headers in ({"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}):
            assert client.post("/jobs/job/control", json=command, headers=headers).status_code == 401
        assert not job.inbox.has_new
        for headers in ({"Sec-Fetch-Site": "same-origin"}, {"Origin": job.url}):
            assert client.post("/jobs/job/control", json=command, headers=headers).status_code == 200
        assert [one.author for one in job.inbox.take()] == ["browser at 127.0.0.1"] * 2


def test_a_link_admits_one_browser_once(job: Served) -> None:
    with job.client() as client:
        path = client.post("/login-links").json()["path"]
    with job.stranger() as first, job.stranger() as second:
        admitted = first.get(path)
        assert (admitted.status_code, admitted.headers["location"]) == (303, "/")
        assert {"HttpOnly", "Path=/", "SameSite=strict"} <= set(admitted.headers["set-cookie"].split("; "))
        assert first.get("/jobs").status_code == 200
        assert second.get(path).status_code == 401
        assert second.get("/login/guessed").status_code == 401
        assert second.get("/jobs").status_code == 401


def test_a_link_expires_after_a_minute_and_there_are_not_many() -> None:
    now = [0.0]
    access = Access("secret", clock=lambda: now[0])
    old = access.new_link()
    now[0] = 59.9
    young = access.new_link()
    now[0] = 60.0
    assert (access.use_link(old), access.use_link(young), access.use_link(young)) == (False, True, False)
    first, *_ = (access.new_link() for _ in range(17))
    assert not access.use_link(first)


def test_sessions_do_not_pile_up() -> None:
    access = Access("secret")
    cookies = [f"{access.cookie_name}={access.open_session()}" for _ in range(65)]
    assert [access.has_session(cookie) for cookie in cookies] == [False] + [True] * 64


def test_two_servers_of_one_machine_have_cookies_of_their_own() -> None:
    assert Access("a").cookie_name != Access("b").cookie_name


def body_of(length: int) -> bytes:
    return json.dumps({"command": "own", "data": {"a": "x" * (length - 37)}}).encode()


def test_bodies_and_headers_have_limits(job: Served) -> None:
    with job.client() as client:
        json_type = {"Content-Type": "application/json"}
        assert client.post("/jobs/job/control", content=body_of(65_000), headers=json_type).status_code == 200
        assert client.post("/jobs/job/control", content=body_of(65_600), headers=json_type).status_code == 413
        assert client.post("/jobs/job/control", content=body_of(500_000), headers=json_type).status_code == 413
        chunked = iter([b" " * 1000] * 100)
        assert client.post("/jobs/job/control", content=chunked, headers=json_type).status_code == 413
        assert client.get("/jobs", headers={"X": "x" * 15_000}).status_code == 200
    assert works(job)


def test_headers_without_an_end_are_not_read(job: Served) -> None:
    taken = 0
    with job.connect() as connection, suppress(ConnectionError):
        connection.sendall(b"GET /jobs HTTP/1.1\r\nHost: localhost\r\nX: ")
        while taken < 1_000:
            connection.sendall(b"x" * 65_536)
            taken += 1
    assert taken < 1_000
    assert works(job)


@pytest.mark.parametrize(
    "path",
    [
        "/jobs/..%2f..%2fetc%2fpasswd/status",
        "/jobs/%2e%2e/status",
        "/jobs//etc/passwd/status",
        "/jobs/%2fetc%2fpasswd/status",
        "/jobs/job%00/status",
        "/jobs/" + "a" * 5000 + "/status",
        "/jobs/%ff%fe/status",
        "/jobs/job/../other/status",
        "/jobs/job/commands/..%2f..%2fx",
        "/static/..%2froutes.py",
        "/static/../guard.py",
        "/static/%2fetc%2fpasswd",
        "/static/__init__.py",
        "/static/.",
        "/static/",
        "/static/index.html%00.js",
        "//evil.example/jobs",
    ],
)
def test_no_path_leads_out_of_the_jobs_and_the_pages_files(job: Served, path: str) -> None:
    head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n".encode()
    answer = job.raw(head + BEARER + b"\r\n")
    assert status_of(answer) in (400, 404)
    assert b"root:" not in answer
    assert b"import" not in answer


def test_the_host_in_a_request_target_does_not_replace_the_name_that_a_server_is_called_by(job: Served) -> None:
    target = b"GET http://localhost/jobs HTTP/1.1\r\n"
    for host, status in ((b"localhost", 200), (b"evil.example", 421)):
        answer = job.raw(target + b"Host: " + host + b"\r\nConnection: close\r\n" + BEARER + b"\r\n")
        assert status_of(answer) == status


def hello() -> bytes:
    """What a client sends that believes in TLS."""
    return bytes.fromhex("16030100c8010000c403035f") + random.Random(0).randbytes(200)


GARBAGE = [
    hello(),
    b"\x00" * 5000,
    b"\r\n" * 1000,
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"SSH-2.0-OpenSSH_9.6\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /",
    b"POST /login HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
    b"GET \xff HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET / HTTP/1.1\nHost: localhost\n\n",
    b"TRACE / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"CONNECT localhost:22 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 10\r\n\r\n",
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_is_refused_without_a_word_in_the_log(
    job: Served, garbage: bytes, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    answer = b""
    with job.connect() as connection, suppress(OSError):  # it may be closed before all is sent
        connection.sendall(garbage)
        connection.shutdown(socket.SHUT_WR)
        answer = received(connection)
    assert status_of(answer) < 500
    assert works(job)
    assert not [one for one in caplog.records if one.levelno > logging.DEBUG and not one.name.startswith("httpx")]
    assert capfd.readouterr().err == ""


def test_random_bytes_do_not_end_the_server(job: Served) -> None:
    rng = random.Random(3)
    begin = b"POST /jobs/job/control HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n" + BEARER + b"\r\n"
    for number in range(40):
        with job.connect() as connection, suppress(OSError):
            connection.sendall((begin if number % 2 else b"") + rng.randbytes(rng.randrange(1, 3000)))
            connection.shutdown(socket.SHUT_WR)
            assert status_of(received(connection)) < 500
    assert works(job)


def test_pipelined_requests_are_answered_in_order(job: Served) -> None:
    one = b"GET /jobs/%s/status HTTP/1.1\r\nHost: localhost\r\n" + BEARER + b"\r\n"
    last = b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + BEARER + b"\r\n"
    answer = job.raw(b"".join(one % (b"job" if number % 2 else b"x") for number in range(20)) + last)
    statuses = [int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:]]
    assert statuses == [404, 200] * 10 + [200]


def test_a_body_without_end_is_cut_off(job: Served) -> None:
    with job.connect() as connection:
        head = b"POST /jobs/job/control HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(head + BEARER + b"Transfer-Encoding: chunked\r\n\r\n")
        chunks = (b"10000\r\n" + b"x" * 65_536 + b"\r\n" for _ in range(3_000))
        with pytest.raises(OSError, match=r"reset|pipe"):
            all(connection.sendall(chunk) is None for chunk in chunks)
    assert works(job)
    assert not job.inbox.has_new


def test_a_thousand_idle_connections_do_not_lock_anyone_out(job: Served) -> None:
    before = psutil.Process().num_fds()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert limit[0] > 1_500, "this test holds 1,000 connections"
    connections = []
    with ExitStack() as stack:
        for _ in range(1_000):
            connection = socket.socket()
            stack.callback(connection.close)
            connection.setblocking(False)
            connection.connect_ex(("127.0.0.1", job.server.port))
            connections.append(connection)
        time.sleep(0.3)
        assert psutil.Process().num_fds() - before <= 1_000 + 64 + 8
        answer = httpx.get(f"{job.url}/jobs", headers={"Authorization": f"Bearer {TOKEN}"}, timeout=PATIENCE)
        assert answer.status_code == 200
    until(lambda: psutil.Process().num_fds() <= before + 16)
    assert works(job)  # it pauses for a second after too many connections


def test_the_connection_that_idles_for_longest_makes_room(job: Served) -> None:
    with ExitStack() as stack:
        idle = [stack.enter_context(job.connect()) for _ in range(64)]
        late = stack.enter_context(job.connect())
        late.sendall(b"GET /jobs HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + BEARER + b"\r\n")
        assert status_of(received(late)) == 200
        assert received(idle[0]) == b""
        idle[-1].sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert status_of(received(idle[-1])) == 200


@pytest.mark.slow
def test_slow_clients_are_cut_off_after_ten_seconds_and_nobody_waits_for_them(job: Served) -> None:
    head = b"GET /jobs HTTP/1.1\r\nHost: localhost\r\nX-Padding: "
    with ExitStack() as stack:
        slow = [stack.enter_context(job.connect()) for _ in range(50)]
        began = time.monotonic()
        for connection in slow[:25]:
            connection.sendall(b"POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
            connection.sendall(b"Content-Length: 1000\r\n\r\n")
        is_open, position = set(slow), 0
        while is_open and time.monotonic() - began < 30:
            for connection in list(is_open):
                try:
                    connection.send(head[position % len(head) :][:1])
                    connection.setblocking(False)
                    if connection.recv(1000) == b"":
                        is_open.discard(connection)
                except BlockingIOError:
                    continue
                except OSError:
                    is_open.discard(connection)
            position += 1
            asked = time.monotonic()
            assert works(job)
            assert time.monotonic() - asked < 8, "it waited for those that are cut off after 10 s"
            time.sleep(1)
        assert not is_open


@pytest.mark.slow
def test_a_client_that_does_not_read_is_cut_off_and_its_answer_given_up(job: Served) -> None:
    for step in range(20_000):
        job.feed.add_record({"step": step, **{f"metric_{one}": float(step) for one in range(10)}})
    request = b"GET /jobs/job/metrics?points=10000 HTTP/1.1\r\nHost: localhost\r\n" + BEARER + b"\r\n"
    before = psutil.Process().num_fds()
    with ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(job.connect()).sendall(request * 10)
        until(lambda: psutil.Process().num_fds() >= before + 8)
        until(lambda: psutil.Process().num_fds() <= before + 4)
        assert works(job)


def test_guesses_of_the_token_are_slowed_down_and_the_owner_is_not(job: Served) -> None:
    guessed, is_done = [], threading.Event()

    def guess() -> None:
        with job.stranger() as client:
            while not is_done.is_set():
                guessed.append(client.get("/jobs", headers={"Authorization": "Bearer guess"}).status_code)

    began = time.monotonic()
    threads = [threading.Thread(target=guess) for _ in range(4)]
    for thread in threads:
        thread.start()
    with job.client() as client:
        while len(guessed) < 110:
            assert client.get("/jobs").status_code == 200
    is_done.set()
    for thread in threads:
        thread.join()
    assert set(guessed) == {401}
    assert len(guessed) <= 100 + 10 * (time.monotonic() - began) + len(threads)
