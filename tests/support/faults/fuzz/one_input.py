"""Sends changed files through doors in a process of their own, which has limits; what came of each door is reported."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import multiprocessing
import os
import re
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.faults.fuzz.doors import Door, NoMessageError

_MARGIN = 3 << 30
"""How much memory the child may ask for before the system refuses it."""
_IN_ONSTEP = re.compile(r"/onstep/(.*)")
_TRACEBACK = "Traceback (most recent call last)"
_SHOWN = 8 << 20
"""Bytes of the output that are looked at."""
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["tests.support.faults.fuzz.preloaded"])


@dataclass(frozen=True)
class Limits:
    """What a door may take."""

    seconds: int = 10
    """Of processor time; of waiting, six times as long, since the machine may be busy."""
    growth_bytes: int = 1 << 30
    """Growth of the resident memory."""


@dataclass(frozen=True)
class Outcome:
    """What came of a door."""

    verdict: str
    """"read" or "refused", or else "growth", "hang" or "raw error", which must not be."""
    door: str
    error: str = ""


def through_doors(
    doors_of: Callable[[str], Sequence[Door]], name: str, numbers: list[int], place: Path, limits: Limits
) -> list[Outcome]:
    """What came of the doors `numbers` of `doors_of(name)`, called one after the other in the directory `place`."""
    report = place.parent / f"{place.name}.jsonl"
    stacks = place.with_suffix(".stacks")
    for file in (report, stacks):
        file.write_text("")
    child = _SERVER.Process(target=_live, args=(doors_of, name, numbers, place, report, limits))
    child.start()
    child.join(timeout=20 * limits.seconds * len(numbers))
    with contextlib.suppress(ProcessLookupError):  # of a child with others of its own
        os.killpg(child.pid or 0, signal.SIGKILL)
    child.join()
    outcomes = [Outcome(**json.loads(line)) for line in report.read_text().splitlines()]
    if len(outcomes) < len(numbers):
        door = doors_of(name)[numbers[len(outcomes)]].name
        waiting, code = stacks.read_text(errors="replace"), child.exitcode or 0
        how = "hang" if waiting or code == -signal.SIGKILL else "raw error"
        ended = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        outcomes.append(Outcome(how, door, f"the process ended with {ended}\n{waiting[:4000]}"))
    return outcomes


def _live(
    doors_of: Callable[[str], Sequence[Door]], name: str, numbers: list[int], place: Path, report: Path, limits: Limits
) -> None:
    os.setpgid(0, 0)
    os.chdir(place)
    output = os.open("../output.txt", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    for target, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, output), (2, output)):
        os.dup2(source, target)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit = _status("VmData") + _MARGIN
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    doors = doors_of(name)
    for number in numbers:
        os.ftruncate(output, 0)
        with report.open("a") as file, _limited(place.with_suffix(".stacks"), limits):
            outcome = _watched(doors[number], output, limits)
            file.write(json.dumps(vars(outcome)) + "\n")
    os._exit(0)


@contextlib.contextmanager
def _limited(stacks: Path, limits: Limits) -> Iterator[None]:
    """End this process, with its stacks written, if it computes or waits for too long."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime) + limits.seconds + 1
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    with stacks.open("w") as file:
        faulthandler.register(signal.SIGXCPU, file=file, all_threads=False, chain=True)
        faulthandler.dump_traceback_later(6 * limits.seconds, exit=True, file=file)
        yield
        faulthandler.cancel_dump_traceback_later()
        faulthandler.unregister(signal.SIGXCPU)


def _watched(door: Door, output: int, limits: Limits) -> Outcome:
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _status("VmRSS")
    outcome = _through(door, output)
    growth = _status("VmHWM") - before
    if growth > limits.growth_bytes and outcome.verdict != "raw error":
        return Outcome("growth", door.name, f"memory grew by {growth >> 20} MiB")
    return outcome


def _through(door: Door, output: int) -> Outcome:
    from onstep.errors import OnstepError

    try:
        code = door.enter()
        sys.stdout.flush()
        sys.stderr.flush()
        text = os.pread(output, _SHOWN, 0).decode("utf-8", "replace")
        if code and not text.strip():
            raise NoMessageError(f"exit code {code}")
    except OnstepError as error:
        return Outcome("refused", door.name, f"{type(error).__name__}: {str(error)[:300]}")
    except MemoryError as error:
        return Outcome("growth", door.name, _described(error))
    except BaseException as error:  # noqa: BLE001 - any error is what is looked for, those of Rust are no Exception
        if isinstance(error, OSError) and error.errno is not None and type(error).__module__ == "builtins":
            return Outcome("refused", door.name, f"{type(error).__name__}: {error}"[:300])
        return Outcome("raw error", door.name, _described(error))
    if _TRACEBACK in text:
        return Outcome("raw error", door.name, f"printed: {text[text.index(_TRACEBACK) :][-4000:]}")
    is_refused = code is not None and code not in door.fine
    return Outcome("refused" if is_refused else "read", door.name, text.strip()[-300:] if is_refused else "")


def _described(error: BaseException) -> str:
    """The error, then its traceback from the innermost frame of Onstep on."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f"{found[1]}:{one.lineno}" for one in frames if (found := _IN_ONSTEP.search(one.filename))]
    whole = "".join(traceback.format_exception(error))
    return f"{type(error).__name__}: {str(error)[:300]}\nat {' < '.join(own[::-1][:4])}\n{whole[-4000:]}"


def _status(name: str) -> int:
    """A size of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)
