"""What a connection asks for, and whom it trusts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from onstep.diloco.client import DiLoCoClient, RefusedByServerError
from onstep.diloco.wire.http import STATUS
from onstep.diloco.worker.first_contact import check_server
from onstep.errors import ConfigError


def test_no_answer_is_asked_for_in_compressed_form() -> None:
    asked: list[str | None] = []

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.headers["Accept-Encoding"])
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *words: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Page) as page:
        thread = threading.Thread(target=page.handle_request)
        thread.start()
        with DiLoCoClient(f"127.0.0.1:{page.server_port}", token="x") as client:
            client.get_status()
        thread.join()
    assert asked == ["identity"]


def test_a_file_that_is_not_of_an_authority_is_refused(tmp_path: Path) -> None:
    (tmp_path / "key.pem").write_text("something else")
    with pytest.raises(ConfigError, match=r"verify must be the PEM file of an authority, and .*key\.pem is not one"):
        DiLoCoClient("https://127.0.0.1:1", verify=tmp_path / "key.pem", token="x")


class Web(BaseHTTPRequestHandler):
    """A web server of another kind: its answers are pages, or JSON of its own."""

    def do_GET(self) -> None:
        if self.path == STATUS:
            self.send_response(404)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(b'{"detail": "Not Found"}')
        else:
            self.send_error(404)

    do_POST = do_GET

    def log_message(self, *args: Any) -> None:
        """Print nothing."""


def test_another_server_at_the_address_is_named_in_one_line_and_not_asked_again() -> None:
    with HTTPServer(("127.0.0.1", 0), Web) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with DiLoCoClient(f"127.0.0.1:{server.server_port}", timeout=10.0) as client:
            calls: list[Callable[[], object]] = [
                lambda: client.register("a", parameters={"weight": torch.ones(1)}),
                client.get_status,  # JSON
                client.get_global_params,
            ]
            for call in calls:
                with pytest.raises(RefusedByServerError, match="this is not a DiLoCo server") as refused:
                    call()
                assert "give the address and port that `onstep diloco server` has printed" in str(refused.value)
                assert "<" not in str(refused.value)
                assert "\n" not in str(refused.value)
        server.shutdown()


class Older(Web):
    """A DiLoCo server of another version of the protocol."""

    def do_GET(self) -> None:
        info = b'{"protocol_version": 1, "settings": {"num_shares": 1}}'
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(info)))
        self.end_headers()
        self.wfile.write(info)


def test_a_server_of_another_version_is_named_before_a_worker_is_built() -> None:
    with HTTPServer(("127.0.0.1", 0), Older) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(RefusedByServerError, match="the server 1; install the same version of onstep at both ends"):
            check_server(f"127.0.0.1:{server.server_port}", lost_seconds=5.0, auth_token="x")
        server.shutdown()
