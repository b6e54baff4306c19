"""Runs work in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Task(Generic[T]):
    """Work in a thread of its own that does not keep the process alive."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._result: T
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name="diloco", daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], T]) -> None:
        try:
            self._result = work()
        except BaseException as error:  # noqa: BLE001 - `result` raises it in the thread that asks
            self._error = error

    @property
    def is_done(self) -> bool:
        """Whether `result` returns at once."""
        return not self._thread.is_alive()

    def wait(self, timeout: float) -> bool:
        """Wait, but not longer than `timeout` seconds; whether the work is done."""
        self._thread.join(timeout)
        return self.is_done

    def result(self) -> T:
        """Wait for the work and return its result, or raise its error."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result
