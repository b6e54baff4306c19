"""Tokens, TLS, addresses, and several servers that share the parameters."""

from __future__ import annotations

import socket
import ssl
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor

from onstep.diloco.client import DiLoCoClient, RefusedByServerError, ServerLostError
from onstep.diloco.client.connection import url_of
from onstep.diloco.server import DiLoCoServer
from onstep.diloco.wire.tokens import find_token, keep_token, own_address_towards, token_path
from onstep.errors import ConfigError
from onstep.http.server import TlsFiles
from tests.support.diloco.raw_worker import RawWorker
from tests.support.diloco.tls import make_tls_files

Serve = Callable[..., DiLoCoServer]
Worker = Callable[..., RawWorker]


def test_a_token_is_made_for_the_port_and_found_by_clients_on_this_machine(serve: Serve) -> None:
    server = serve()
    path = token_path(server.port)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_text().strip() == server.token
    with DiLoCoClient(server.address) as client:
        assert client.get_status()["status"] == "running"
    with DiLoCoClient(server.address, token="wrong") as client, pytest.raises(RefusedByServerError) as refused:
        client.get_status()
    assert refused.value.status == 401


def test_the_token_file_of_a_server_at_any_port_ends_with_it(serve: Serve) -> None:
    server = serve(port=0)
    assert token_path(server.port).exists()
    server.stop()
    assert not token_path(server.port).exists()


def test_a_token_file_that_others_can_read_is_not_trusted() -> None:
    token = keep_token(1)
    assert keep_token(1) == token
    token_path(1).chmod(0o644)
    assert find_token("127.0.0.1", 1, {}) is None
    assert keep_token(1) != token
    assert keep_token(1, renew=True) != keep_token(1, renew=True)


def own_addresses() -> list[str]:
    """Of all network interfaces."""
    families = (socket.AF_INET, socket.AF_INET6)
    addresses = [one for found in psutil.net_if_addrs().values() for one in found if one.family in families]
    return [one.address for one in addresses if "%" not in one.address]


@pytest.mark.parametrize(("host", "loopback"), [("0.0.0.0", "127.0.0.1"), ("::", "[::1]")])
def test_a_server_at_all_addresses_is_reached_by_those_of_its_machine(serve: Serve, host: str, loopback: str) -> None:
    if host == "::" and own_address_towards("::1") is None:
        pytest.skip("no IPv6")
    server = serve(host=host)
    assert server.address == f"{loopback}:{server.port}"
    for address in (server.address, f"{host if host == '0.0.0.0' else '[::]'}:{server.port}"):
        with DiLoCoClient(address) as client:
            assert client.get_status()["status"] == "running"


def test_who_has_no_token_is_told_where_to_get_it_and_nothing_else(serve: Serve) -> None:
    server = serve()
    with DiLoCoClient(server.address, token="wrong") as client, pytest.raises(RefusedByServerError) as refused:
        client.get_status()
    text = str(refused.value)
    assert all(word in text for word in ("DILOCO_TOKEN,", "DILOCO_TOKEN_FILE", "--token-file", "prints"))
    assert server.token is not None
    assert server.token not in text
    assert str(token_path(server.port).parent) not in text  # the answer is public


def test_where_a_token_comes_from(tmp_path: Path) -> None:
    own = keep_token(2)
    (tmp_path / "token").write_text(" from-a-file\n")
    assert find_token("127.0.0.1", 2, {}) == own
    for host in ("localhost", "127.0.0.1", "::1", "0.0.0.0", "::", socket.gethostname().upper(), *own_addresses()):
        assert find_token(host, 2, {}) == own, host
    for host in ("example.org", "192.0.2.77", "2001:db8::77", f"{socket.gethostname()}.example.org"):
        assert find_token(host, 2, {}) is None, host
    assert find_token("example.org", 2, {"DILOCO_TOKEN_FILE": str(tmp_path / "token")}) == "from-a-file"
    assert find_token("127.0.0.1", 2, {"FORGATHER_DILOCO_SERVER_TOKEN": "theirs"}) == "theirs"
    assert find_token("127.0.0.1", 2, {"DILOCO_TOKEN": "ours", "FORGATHER_DILOCO_SERVER_TOKEN": "theirs"}) == "ours"
    with pytest.raises(ConfigError, match="token file"):
        find_token("example.org", 2, {"DILOCO_TOKEN_FILE": str(tmp_path / "none")})
    with pytest.raises(ConfigError, match="single word"):
        find_token("example.org", 2, {"DILOCO_TOKEN": "two words"})


def test_tls_with_an_own_authority(serve: Serve, parameters: dict[str, Tensor], tmp_path: Path) -> None:
    files = make_tls_files(tmp_path)
    server = serve(tls=files)
    assert server.address.startswith("https://127.0.0.1:")
    with DiLoCoClient(server.address, verify=files.certificate) as client:
        client.register("a", parameters=parameters)
        ones = {name: torch.ones_like(one) for name, one in parameters.items()}
        got = client.submit_pseudogradients("a", ones)
    assert torch.allclose(got["head.bias"], parameters["head.bias"] - 0.7 * 1.6)


def test_a_server_with_an_unknown_authority_gets_no_token(serve: Serve, tmp_path: Path) -> None:
    server = serve(tls=make_tls_files(tmp_path))
    with DiLoCoClient(server.address, max_retries=0) as client, pytest.raises(ServerLostError):
        client.get_status()
    with (
        DiLoCoClient(f"http://127.0.0.1:{server.port}", max_retries=0) as client,
        pytest.raises(ConnectionError, match="if it serves https, give its address with https://"),
    ):
        client.get_status()


def test_missing_tls_files_are_named(parameters: dict[str, Tensor], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.pem"):
        DiLoCoServer(parameters, port=0, tls=TlsFiles(tmp_path / "none.pem", tmp_path / "none.pem"))
    with pytest.raises(ConfigError, match=r"none\.pem"):
        DiLoCoClient("https://127.0.0.1:1", verify=tmp_path / "none.pem", token="x")
    assert ssl.HAS_TLSv1_2


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("host", "http://host:8512"),
        ("host:9000", "http://host:9000"),
        ("https://host:9000/", "https://host:9000"),
        ("[::1]:9000", "http://[::1]:9000"),
    ],
)
def test_addresses(address: str, url: str) -> None:
    assert url_of(address) == url


@pytest.mark.parametrize("address", ["", "host:port", "http://host/path", "ftp://host", "user@host:1", "host:99999999"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError):
        DiLoCoClient(address)


def test_a_server_that_is_not_there_is_lost_and_not_refused() -> None:
    with (
        DiLoCoClient("127.0.0.1:9", max_retries=0, token="x") as client,
        pytest.raises(ServerLostError, match=r"127\.0\.0\.1:9"),
    ):
        client.get_status()


def test_something_else_than_a_server_is_said_to_be_that() -> None:
    import http.server

    class Page(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "5")
            self.end_headers()
            self.wfile.write(b"<html")

        def log_message(self, *words: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Page) as page:
        thread = threading.Thread(target=page.serve_forever)
        thread.start()
        try:
            client = DiLoCoClient(f"127.0.0.1:{page.server_port}", max_retries=0, token="x")
            with client, pytest.raises(ConnectionError):
                client.heartbeat("a")
        finally:
            page.shutdown()
            thread.join()
