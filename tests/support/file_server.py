"""Serves files that are made on request over HTTP, and notes what is asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Served:
    """A server, and what it was asked for."""

    url: str = ""
    ranges: list[tuple[str, int]] = field(default_factory=list)
    """The path and first byte of each request."""
    sent: int = 0
    """Bytes of files."""


@contextmanager
def file_server(
    content_of: Callable[[str], bytes | None], *, breaks_after: int | None = None, has_ranges: bool = True
) -> Iterator[Served]:
    """Serve `content_of(path)`; None is not found. A connection is closed after `breaks_after` bytes."""
    served = Served()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = content_of(self.path)
            if content is None:
                self.send_error(404)
                return
            start = int((self.headers.get("Range") or "bytes=0-")[6:].partition("-")[0]) if has_ranges else 0
            served.ranges.append((self.path, start))
            rest = content[start:]
            self.send_response(206 if has_ranges else 200)
            self.send_header("Content-Length", str(len(rest)))
            if has_ranges:
                self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            self.end_headers()
            try:
                self.wfile.write(rest[:breaks_after])
                served.sent += len(rest[:breaks_after])
            except OSError:
                return

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    served.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield served
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
