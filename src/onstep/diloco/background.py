"""Runs work in threads that do not keep the process alive."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

T = TypeVar("T")


def in_thread(work: Callable[[], T]) -> Future[T]:
    """The result of work in a thread of its own."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised by `result` in the thread that asks
            future.set_exception(error)

    threading.Thread(target=run, name="diloco", daemon=True).start()
    return future


class InOrder:
    """Runs one piece of work after the other, as collectives have to be that every rank begins in the same order."""

    def __init__(self) -> None:
        self._last: Future[Any] | None = None

    def in_thread(self, work: Callable[[], T]) -> Future[T]:
        """The result of work that begins once the work before has ended."""
        before = self._last

        def run() -> T:
            if before is not None:
                wait([before])
            return work()

        self._last = future = in_thread(run)
        return future
