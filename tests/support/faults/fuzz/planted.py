"""Doors that do what no door may, to see that it is found."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from collections.abc import Sequence

from onstep.errors import DataError
from tests.support.faults.fuzz.doors import Door


class Panic(BaseException):
    """No Exception, like a panic of a library in Rust."""


def _raise(error: BaseException) -> None:
    raise error


def _print_a_traceback() -> None:
    try:
        _raise(KeyError("x"))
    except KeyError:
        logging.exception("oh")


def _fail_without_a_word() -> int:
    return 3


def _grow() -> None:
    assert len(b"x" * (200 << 20)) > 0


def _say_no() -> int:
    print("error: no")
    return 1


DOORS = {
    "raw error": lambda: _raise(KeyError("x")),
    "error of a library": lambda: json.loads("{"),
    "panic": lambda: _raise(Panic("x")),
    "printed traceback": _print_a_traceback,
    "no message": _fail_without_a_word,
    "crash": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "hang": lambda: time.sleep(60),
    "busy hang": lambda: [None for _ in iter(int, 1)],
    "growth": _grow,
    "too much memory": lambda: bytearray(100 << 30),
    "refused": lambda: _raise(DataError("x is bad")),
    "refused by a command": _say_no,
    "error of the disk": lambda: _raise(FileNotFoundError(2, "No such file", "x")),
    "read": lambda: None,
}


def doors_of(name: str) -> Sequence[Door]:
    """The door of that name."""
    return [Door(name, DOORS[name])]
