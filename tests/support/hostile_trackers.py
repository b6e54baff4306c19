"""Trackers that take everything and remember it, and ones that do what trackers must not."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onstep.trackers import RunIdentity


def identity(directory: Path, **values: Any) -> RunIdentity:
    return RunIdentity(**{"name": "run", "run_id": "abc", "directory": directory, **values})


class Remembering:
    """Takes everything."""

    name = "remembering"
    keeps_names = False
    takes_back = False

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.threads: set[int] = set()

    def open(self, run: RunIdentity, state: Mapping[str, Any]) -> None:
        self._note("open", run, dict(state))

    def log(self, metrics: Mapping[str, float], step: int, timestamp: float) -> None:
        self._note("log", dict(metrics), step, timestamp)

    def text(self, tag: str, text: str, step: int) -> None:
        self._note("text", tag, text, step)

    def state_dict(self) -> dict[str, Any]:
        return {"calls": len(self.calls)}

    def close(self, status: str) -> None:
        self._note("close", status)

    @property
    def steps(self) -> list[int]:
        return [call[2] for call in self.calls if call[0] == "log"]

    @property
    def names(self) -> list[str]:
        return [str(call[0]) for call in self.calls]

    def _note(self, *call: Any) -> None:
        self.threads.add(threading.get_ident())
        self.calls.append(call)


class Raising(Remembering):
    """Raises what it is made with, at each of the named calls."""

    def __init__(self, *where: str, error: BaseException | None = None) -> None:
        super().__init__()
        self.where = set(where)
        self.error = error or OSError("no route to host")

    def _note(self, *call: Any) -> None:
        super()._note(*call)
        if call[0] in self.where:
            raise self.error


class Hanging(Remembering):
    """Does not return from the named calls until it is released."""

    def __init__(self, *where: str) -> None:
        super().__init__()
        self.where = where
        self.released = threading.Event()
        self.reached = threading.Event()

    def _note(self, *call: Any) -> None:
        super()._note(*call)
        if call[0] in self.where:
            self.reached.set()
            self.released.wait()
