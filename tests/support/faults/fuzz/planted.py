"""Doors that do what no door may, to see that the fuzzer finds it: prints, as JSON, what was found of each."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from pathlib import Path

from onstep.errors import DataError
from tests.support.faults.fuzz.campaign import Campaign, as_json
from tests.support.faults.fuzz.doors import Door
from tests.support.faults.fuzz.formats import Format
from tests.support.faults.fuzz.one_input import Limits


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


def _make(directory: Path) -> None:
    (directory / "text").mkdir(parents=True)
    (directory / "text" / "a.txt").write_text("some text\n")


def main() -> None:
    """Find them all."""
    formats = [Format(name, (("a.txt", "bytes", 1),), (Door(name, door),), "text") for name, door in DOORS.items()]
    campaign = Campaign(seed=1, limits=Limits(seconds=1.0, growth_bytes=100 << 20))
    try:
        campaign.prepare(_make, ("onstep",))
        outcome = campaign.run([(form, 0) for form in formats])
    finally:
        campaign.close()
    print(json.dumps(as_json(outcome)))


if __name__ == "__main__":
    main()
