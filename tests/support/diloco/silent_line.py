"""A line between a worker and its server that swallows packets while it is cut: nobody is told anything."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress


class SilentLine:
    """Forwards connections to a port of this machine; while `is_cut`, it takes what is sent and delivers nothing."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.is_cut = False
        self._sockets = [socket.create_server(("127.0.0.1", 0))]
        self.address = f"127.0.0.1:{self._sockets[0].getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """End all connections."""
        for one in self._sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near = self._sockets[0].accept()[0]
                far = socket.create_connection(("127.0.0.1", self._port))
                self._sockets += near, far
                for source, target in ((near, far), (far, near)):
                    threading.Thread(target=self._forward, args=(source, target), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        was_cut = False
        with suppress(OSError):
            while content := source.recv(1 << 16):
                was_cut = was_cut or self.is_cut  # what follows lost bytes is of no use to anybody
                if not was_cut:
                    target.sendall(content)
            if not was_cut and not self.is_cut:
                target.shutdown(socket.SHUT_WR)
