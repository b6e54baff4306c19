"""Does several requests at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")

CONCURRENCY = 8
"""Requests at a time, of parts and of files."""


def for_each(items: Iterable[T], work: Callable[[T], object]) -> None:
    """Do the work for each item, `CONCURRENCY` at a time; the first error is raised once all have ended.

    A process can end while a request hangs: nothing waits for the threads then.

    Args:
        items: what is worked on.
        work: called in threads.
    """
    todo = list(items)
    errors: list[BaseException | None] = [None] * len(todo)
    numbers, turn = iter(range(len(todo))), threading.Lock()

    def run() -> None:
        while True:
            with turn:
                number = next(numbers, None)
            if number is None:
                return
            try:
                work(todo[number])
            except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
                errors[number] = error

    threads = [
        threading.Thread(target=run, name=f"onstep-store-{number}", daemon=True)
        for number in range(min(CONCURRENCY, len(todo)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        if error is not None:
            raise error
