"""Services that trackers of other processes talk to over a socket, and what can go wrong with them."""

from __future__ import annotations

import json
import random
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from onstep.trackers import CannotContinueError, RunIdentity

Curves = dict[tuple[str, int], float]
"""The newest value of each name at each step."""


class Service:
    """Keeps the points of runs; it can be down, restart with nothing, and leave calls unanswered.

    Args:
        path: Its socket.
        hangs: Decides, for each connection, how many calls are answered before one is not; None answers all.
    """

    def __init__(self, path: Path, hangs: random.Random | None = None) -> None:
        self.path, self._hangs = path, hangs
        self.runs: dict[str, list[tuple[str, int, float]]] = {}
        """The points of each run, in the order of their arrival."""
        self.num_hung = self.num_lost = 0
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None
        self._connections: set[socket.socket] = set()
        self.start()

    def start(self) -> None:
        """Accept connections."""
        if self._listener is not None:
            return
        self.path.unlink(missing_ok=True)
        self._listener = listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self.path))
        listener.listen(64)
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def stop(self) -> None:
        """Refuse connections, and end those that there are."""
        listener, self._listener = self._listener, None
        if listener is None:
            return
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for connection in list(self._connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def restart_empty(self) -> None:
        """Forget everything, as a service whose disk was replaced."""
        self.stop()
        with self._lock:
            self.runs.clear()
        self.start()

    def be_well(self) -> None:
        """Be there, and answer every call from now on."""
        self._hangs = None
        self.stop()
        self.start()

    def curves(self, run: str) -> Curves:
        """The points of a run; one that was killed before its first checkpoint begins anew, as another run."""
        with self._lock:
            return {(name, step): value for name, step, value in self.runs[run]}

    @property
    def num_points(self) -> int:
        """How many points have arrived, repeated ones included."""
        with self._lock:
            return sum(map(len, self.runs.values()))

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        most = None if self._hangs is None else self._hangs.randint(0, 40)
        takes_last = self._hangs is not None and self._hangs.random() < 0.5
        with suppress(OSError), connection, connection.makefile("rw", encoding="utf-8") as file:
            for number, line in enumerate(file):
                is_last = number == most
                answer = self._answer(json.loads(line)) if not is_last or takes_last else {}
                if is_last:
                    self.num_hung += 1
                    file.readline()  # until the other side is gone
                    break
                file.write(json.dumps(answer) + "\n")
                file.flush()
        self._connections.discard(connection)

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            run = request["run"]
            if request["call"] == "open" and not request["is_known"]:
                self.runs.setdefault(run, [])
            if run not in self.runs:
                self.num_lost += 1
                return {"is_lost": True}
            for name, value in request.get("metrics", {}).items():
                self.runs[run].append((name, request["step"], value))
            return {}


class SocketTracker:
    """Sends points to a service, each call answered before it returns."""

    takes_back = False
    keeps_names = False
    settling_seconds = 0.0

    def __init__(self, name: str, path: Path) -> None:
        self.name, self._path = name, path
        self._socket: socket.socket | None = None
        self._run = ""

    def open(self, run: RunIdentity, state: Mapping[str, Any]) -> None:
        self._leave()
        self._run = run.run_id
        self._ask(call="open", is_known=state.get("run") == run.run_id)

    def log(self, metrics: Mapping[str, float], step: int, timestamp: float) -> None:
        self._ask(call="log", metrics=dict(metrics), step=step)

    def text(self, tag: str, text: str, step: int) -> None:
        self._ask(call="text", metrics={f"text {tag} {text}": 0.0}, step=step)

    def state_dict(self) -> dict[str, Any]:
        return {"run": self._run}

    def close(self, status: str) -> None:
        self._leave()

    def _leave(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None

    def _ask(self, **request: Any) -> None:
        try:
            answer = self._answer_to({**request, "run": self._run})
        except OSError:
            self._leave()  # the next call connects again
            raise
        if answer.get("is_lost"):
            raise CannotContinueError(f"{self.name} does not have the run {self._run}")

    def _answer_to(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._socket is None:
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.connect(str(self._path))
        self._socket.sendall(json.dumps(request).encode() + b"\n")
        received = b""
        while not received.endswith(b"\n"):
            block = self._socket.recv(4096)
            if not block:
                raise ConnectionError(f"{self.name} has ended the connection")
            received += block
        answer: dict[str, Any] = json.loads(received)
        return answer


class BufferingTracker(SocketTracker):
    """Sends points from a thread of its own, a little later, as the packages of services do: a kill takes some."""

    settling_seconds = 2.0

    def open(self, run: RunIdentity, state: Mapping[str, Any]) -> None:
        super().open(run, state)
        self._waiting: list[dict[str, Any]] = []
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def log(self, metrics: Mapping[str, float], step: int, timestamp: float) -> None:
        self._waiting.append({"call": "log", "metrics": dict(metrics), "step": step})

    def close(self, status: str) -> None:
        self._ends.set()
        self._thread.join()
        super().close(status)

    def _work(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._ends.wait(0.2)
            while self._waiting:
                self._ask(**self._waiting[0])
                del self._waiting[0]
