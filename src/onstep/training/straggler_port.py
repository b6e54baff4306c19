"""A port on the loopback where a request switches the straggler detection on and off."""

from __future__ import annotations

import logging
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

logger = logging.getLogger(__name__)


class TogglePort:
    """Listens on 127.0.0.1; `curl -X POST http://127.0.0.1:<port>/` turns the detection over, GET only asks.

    What it says holds from the next report on.

    Args:
        port: 0 takes a free one. One that is taken costs a warning, and nothing can be switched.
        is_wanted: whether the detection is on now.
    """

    def __init__(self, port: int, is_wanted: bool) -> None:
        self.is_wanted = is_wanted
        self._server: ThreadingHTTPServer | None = None
        try:
            self._server = ThreadingHTTPServer(("127.0.0.1", port), _handler_of(self))
        except OSError as error:
            logger.warning("the straggler detection cannot be switched: port %d of 127.0.0.1: %s", port, error)
            return
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="straggler port", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int | None:
        """Where it listens; None where it does not."""
        return None if self._server is None else int(self._server.server_address[1])

    def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = None


def _handler_of(port: TogglePort) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer()

        def do_POST(self) -> None:
            if self.headers.get("Origin") is not None:  # a web page in somebody's browser
                self.send_error(403)
                return
            port.is_wanted = not port.is_wanted
            self._answer()

        def log_message(self, format: str, *args: object) -> None:
            """A request is no news."""

        def _answer(self) -> None:
            body = f"straggler detection is {'on' if port.is_wanted else 'off'} from the next report on\n".encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return Handler
