"""Stacks of this process: of its threads, of its data workers, and of a process that cannot answer by itself."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import re
import signal
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
import zlib
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from onstep.training.host_processes import birth_of, state_of, this_host

DUMP_SIGNAL: int | None = getattr(signal, "SIGRTMIN", 0) + 9 if hasattr(signal, "SIGRTMIN") else None
"""A real-time signal, which nobody else uses, that makes a process write its stacks; None where there are none."""

_DUMP_SECONDS = 1.0
_TORCH = str(Path(torch.__file__).parent)
_ONSTEP = str(Path(__file__).parents[1])
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_COLLECTIVE = (f"{_TORCH}/distributed/", f"{_TORCH}/nn/parallel/distributed.py")


def frame_of(thread: int | None) -> FrameType | None:
    """Where a thread stands; None for one that has ended."""
    return sys._current_frames().get(thread or 0)


def place_of(frame: FrameType | None) -> str:
    """`file:line in function` of the innermost frame of the user's own code below Onstep's, else of all."""
    return _chosen([(one.f_code.co_filename, one.f_lineno, one.f_code.co_name) for one in _outwards(frame)])


def place_of_error(error: BaseException) -> str:
    """The same of the line that raised an error, be it in a data worker."""
    frames = [(one.filename, one.lineno, one.name) for one in reversed(traceback.extract_tb(error.__traceback__))]
    if frames and frames[0][0] == f"{_TORCH}/_utils.py" and frames[0][2] == "reraise":
        told = re.findall(r'(?m)^ *File "([^"\n]+)", line (\d+), in (\S+)', str(error))
        frames = [(name, int(line), function) for name, line, function in reversed(told)] or frames
    return _chosen(frames)


def told_of(error: BaseException) -> tuple[str | None, str | None]:
    """Event and callback whose telling raised an error, as the callback manager has noted them."""
    for note in reversed(getattr(error, "__notes__", [])):
        found = re.fullmatch(r"raised by callback '(.*)' during '(.*)'", note)
        if found:
            return found[2], found[1]
    return None, None


def waits_in_collective(frame: FrameType | None) -> bool:
    """Whether the innermost frames, as far as they are torch's, belong to a collective or a backward pass."""
    for one in _outwards(frame):
        name = one.f_code.co_filename
        if not name.startswith(_TORCH):
            return False
        if name.startswith(_COLLECTIVE) or one.f_code.co_name == "_engine_run_backward":
            return True
    return False


def waits_for_worker(frame: FrameType | None) -> bool:
    """Whether the innermost frame that is not the standard library's is the data loader's."""
    for one in _outwards(frame):
        name = one.f_code.co_filename
        if name.startswith(_TORCH) or not name.startswith(_LIBRARIES):
            return name.startswith(f"{_TORCH}/utils/data/")
    return False


def is_in_debugger(frame: FrameType | None) -> bool:
    """Whether a thread stands at a debugger's prompt, or an attached debugger may hold it."""
    debugpy = sys.modules.get("debugpy")
    if debugpy is not None and debugpy.is_client_connected():
        return True
    return any(Path(one.f_code.co_filename).name in ("bdb.py", "pdb.py") for one in _outwards(frame))


def stacks_of_threads(left_out: Collection[int]) -> str:
    """The stacks of all Python threads but some, the main thread's first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    parts = []
    for thread, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] != main):
        if thread not in left_out:
            parts.append(f"thread {names.get(thread, thread)}:\n" + "".join(traceback.format_stack(frame)))
    return "\n".join(parts)


class StackDump:
    """A file into which `faulthandler` writes the stacks of this process, or of one of its forked data workers.

    It needs no Python lock, so that it also works where a C call never gives the interpreter back.
    """

    def __init__(self, *, is_alone: bool) -> None:
        self._is_alone = is_alone
        _sweep()
        descriptor, self.path = tempfile.mkstemp(prefix=f"{_own_prefix()}{os.getpid()}-{birth_of(os.getpid())}-")
        self._file = os.fdopen(descriptor, "ab", buffering=0)
        self._is_registered = DUMP_SIGNAL is not None and signal.getsignal(DUMP_SIGNAL) is signal.SIG_DFL
        if self._is_registered:
            assert DUMP_SIGNAL is not None
            faulthandler.register(DUMP_SIGNAL, file=self._file, all_threads=True)

    def renew(self, seconds: float | None) -> None:
        """Have a process alone write its stacks to standard error unless this is called again within that time.

        It then goes on: perhaps it was only stopped for a while, which no thread of it can tell. Of several ranks the
        others ask for the stacks, and end one that does not answer.

        Args:
            seconds: None is for as long as it takes.
        """
        if not self._is_alone:
            return
        if seconds is None:
            faulthandler.cancel_dump_traceback_later()
            return
        faulthandler.dump_traceback_later(seconds, file=_standard_error() or self._file)

    def stacks_of_workers(self) -> str:
        """The stacks of this process's children, which inherited the handler when they were forked."""
        if not self._is_registered:
            return ""
        parts = []
        for child in multiprocessing.active_children():
            if child.pid is not None:
                parts.append(f"data worker {child.pid}:\n{dumped_by(child.pid, self.path)}")
        return "\n".join(parts)

    def close(self) -> None:
        """Give the signal and the timer back, and remove the file."""
        self.renew(None)
        if self._is_registered:
            assert DUMP_SIGNAL is not None
            faulthandler.unregister(DUMP_SIGNAL)
        self._file.close()
        self.remove()

    def remove(self) -> None:
        """Remove the file; `os._exit` leaves no other trace."""
        with suppress(OSError):
            os.unlink(self.path)


def dumped_by(pid: int, path: str) -> str:
    """What a process of this machine writes into its dump file when asked for; "" where it does not."""
    file = Path(path)
    try:
        before = file.stat().st_size
        if DUMP_SIGNAL is None:
            return ""
        os.kill(pid, DUMP_SIGNAL)
        deadline, size = time.monotonic() + _DUMP_SECONDS, before
        while time.monotonic() < deadline:
            time.sleep(0.05)
            grown = file.stat().st_size
            if grown > before and grown == size:
                break
            size = grown
        with file.open("rb") as stream:
            stream.seek(before)
            return stream.read().decode(errors="replace")
    except OSError:
        return ""


def end_children() -> None:
    """Kill the data workers of this process, which would not notice that it is gone while they stand still."""
    for child in multiprocessing.active_children():
        with suppress(OSError, ValueError):
            child.kill()


def _own_prefix() -> str:
    """How the files of this machine's processes begin; the folder may be shared with other containers."""
    return f"onstep-stacks-{zlib.crc32(this_host().encode()):08x}-"


def _sweep() -> None:
    """Remove the files of processes that were killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{_own_prefix()}*"):
        pid, _, birth = path.name.removeprefix(_own_prefix()).rpartition("-")[0].partition("-")
        if pid.isdigit() and birth.isdigit() and state_of(int(pid), int(birth)) == "gone":
            with suppress(OSError):
                path.unlink()


def _standard_error() -> Any:
    """The process's standard error; None where it is closed."""
    try:
        sys.__stderr__.fileno()  # type: ignore[union-attr]
    except (AttributeError, ValueError, OSError):
        return None
    return sys.__stderr__


def _chosen(inner: list[tuple[str, int | None, str]]) -> str:
    """The place to name, of frames with the innermost first."""
    of_onstep = [index for index, (name, _, _) in enumerate(inner) if name.startswith(_ONSTEP)]
    below = inner[: of_onstep[-1]] if of_onstep else inner
    own = [one for one in below if not _is_library(one[0])]
    for name, line, function in (own or inner)[:1]:
        return f"{name}:{line} in {function}"
    return ""


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_library(name: str) -> bool:
    return name.startswith(("<frozen", _ONSTEP, *_LIBRARIES))
