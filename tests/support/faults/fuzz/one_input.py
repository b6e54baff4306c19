"""One input, in a forked child: it is made, goes through its doors, and each outcome is reported through a pipe."""

from __future__ import annotations

import faulthandler
import json
import os
import re
import resource
import traceback
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from tests.support.faults.fuzz.doors import Door, NoMessageError
from tests.support.faults.fuzz.formats import Format

_MARGIN = 3 << 30
"""How much memory the child may ask for before the system refuses it."""
_IN_ONSTEP = re.compile(r"/onstep/(.*)")
_TRACEBACK = "Traceback (most recent call last)"
_SHOWN = 8 << 20
"""Bytes of the output that are looked at."""


@dataclass(frozen=True)
class Limits:
    """What a door may take."""

    seconds: float = 10.0
    growth_bytes: int = 1 << 30
    """Growth of the resident memory."""


def live(form: Format, seed: int, index: int, honest: Path, place: Path, report: int, limits: Limits) -> None:
    """Make input `index` in the directory `place`, and report what comes of it as JSON lines to a descriptor.

    A negative index leaves the honest files as they are, and goes through every door.
    """

    def say(**what: Any) -> None:
        os.write(report, json.dumps(what).encode("ascii") + b"\n")

    os.chdir(place.parent)
    output = os.open("output.txt", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    for target, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, output), (2, output)):
        os.dup2(source, target)
    random = Random(f"{form.name}/{seed}/{index}")
    is_changed = index >= 0
    say(made=form.make_input(random, honest, Path(place.name), is_changed=is_changed))
    os.chdir(place)
    chosen = [door for door in form.doors if random.random() < door.share or not is_changed]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit = _status("VmData") + _MARGIN
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    stacks = open("../stacks.txt", "w")  # noqa: SIM115 - faulthandler writes to it until the end
    for door in chosen:
        say(door=door.name)
        os.ftruncate(output, 0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = _status("VmRSS")
        faulthandler.dump_traceback_later(0.9 * limits.seconds, file=stacks)
        outcome = _through(door, output)
        faulthandler.cancel_dump_traceback_later()
        growth = _status("VmHWM") - before
        if growth > limits.growth_bytes and outcome["verdict"] != "raw error":
            outcome.update(verdict="growth", error=f"memory grew by {growth >> 20} MiB", where=door.name)
        say(**outcome, growth=growth)


def _through(door: Door, output: int) -> dict[str, Any]:
    """What came of a door: its verdict, and the error with the place that it came from."""
    from onstep.errors import OnstepError

    try:
        code = door.enter()
        _flush()
        text = os.pread(output, _SHOWN, 0).decode("utf-8", "replace")
        if code and not text.strip():
            raise NoMessageError(f"exit code {code}")
    except OnstepError as error:
        return {"verdict": "refused", "error": f"{type(error).__name__}: {str(error)[:300]}"}
    except MemoryError as error:
        return {"verdict": "growth", **_described(error)}
    except BaseException as error:  # noqa: BLE001 - any error is what is looked for, those of Rust are no Exception
        if isinstance(error, OSError) and error.errno is not None and type(error).__module__ == "builtins":
            return {"verdict": "refused", "error": f"{type(error).__name__}: {error}"[:300]}
        return {"verdict": "raw error", **_described(error)}
    if _TRACEBACK in text:
        last = text[text.index(_TRACEBACK) :].splitlines()
        return {"verdict": "raw error", "error": f"printed: {last[-1][:300]}", "where": " < ".join(last[-4:-1])[:300]}
    is_refused = code is not None and code not in door.fine
    return {"verdict": "refused" if is_refused else "read", "error": text.strip()[-300:] if is_refused else ""}


def _described(error: BaseException) -> dict[str, str]:
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        f"{found[1]}:{frame.lineno} {frame.name}" for frame in frames if (found := _IN_ONSTEP.search(frame.filename))
    ]
    last = frames[-1] if frames else None
    beyond = (
        [] if last is None or "/onstep/" in last.filename else [f"{Path(last.filename).name}:{last.lineno} {last.name}"]
    )
    where = " < ".join([*beyond, *own[::-1][:4]])
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    more = "" if cause is None else f" (from {type(cause).__name__}: {str(cause)[:150]})"
    whole = "".join(traceback.format_exception(error))
    return {"error": f"{type(error).__name__}: {str(error)[:300]}{more}", "where": where, "trace": whole[-20_000:]}


def _flush() -> None:
    import sys

    sys.stdout.flush()
    sys.stderr.flush()


def _status(name: str) -> int:
    """A size of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)
