"""What a connection asks for, and whom it trusts."""

from __future__ import annotations

import http.server
import threading
from pathlib import Path

import pytest

from onstep.diloco.client import DiLoCoClient
from onstep.errors import ConfigError


def test_no_answer_is_asked_for_in_compressed_form() -> None:
    asked: list[str | None] = []

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.headers["Accept-Encoding"])
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *words: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Page) as page:
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
