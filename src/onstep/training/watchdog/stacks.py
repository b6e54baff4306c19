"""Inspects processes of this machine: whether one is still running, and the stacks of its threads and data workers."""

from __future__ import annotations

import faulthandler
import gc
import mmap
import multiprocessing
import os
import platform
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
from contextlib import contextmanager, suppress
from functools import partial
from itertools import accumulate, chain, islice, repeat, takewhile
from operator import attrgetter, is_not, methodcaller
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

import torch

from onstep.errors import text_of
from onstep.processes.heartbeat import HEARTBEAT, PAGE_BYTES, Called, read_page

State = Literal["runs", "stopped", "gone", "unknown"]
Place = tuple[str, int | None, str]
"""File, line and function of a frame."""

DUMP_SIGNAL: int | None = getattr(signal, "SIGRTMIN", 0) + 9 if hasattr(signal, "SIGRTMIN") else None
"""An otherwise unused real-time signal that makes a process write its stacks; None on systems without any."""

_MOST_FRAMES = 100
_attribute: Any = getattr
_place: Any = attrgetter("f_code.co_filename", "f_lineno", "f_code.co_name")
_DUMP_SECONDS = 1.0
_NEW_SECONDS = 60.0
_MOST_DUMP_BYTES = 1 << 20
_TORCH = str(Path(torch.__file__).parent)
_ONSTEP = str(Path(__file__).parents[1])
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_COLLECTIVE = (f"{_TORCH}/distributed/", f"{_TORCH}/nn/parallel/distributed.py")
_AWAITING = tuple(str(Path(__file__).parents[2] / "distributed" / name) for name in ("beside_compute.py", "buckets.py"))
"""Where a collective that was begun earlier is awaited, which adds no frame of torch's."""
_CALLS = tuple(
    f"{_TORCH}/distributed/{name}.py" for name in ("distributed_c10d", "c10d_logger", "_functional_collectives")
)
_DISPATCHER = (f"{_TORCH}/_ops.py", f"{_TORCH}/_library/")


def this_host() -> str:
    """Identify this machine and its process table: a pid means the same process wherever this value is the same."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{platform.node()} {boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def birth_of(pid: int) -> int:
    """The start time of a process of this machine, in ticks since boot; 0 if the system does not report it.

    With the pid it identifies a process uniquely: pids are reused, even while a dead rank is being looked for.
    """
    fields = _stat(pid)
    return int(fields[19]) if fields else 0


def state_of(pid: int, birth: int) -> State:
    """The state of a process of this machine; unknown if the system does not report it."""
    fields = _stat(pid)
    if fields is None:
        return "unknown"
    if not fields or fields[0] in "ZX" or int(fields[19]) != birth:
        return "gone"
    return "stopped" if fields[0] in "Tt" else "runs"


def end_own_process() -> NoReturn:
    """End this process at once, and its data workers, which would not notice if they hang."""
    for child in multiprocessing.active_children():
        with suppress(OSError, ValueError):
            child.kill()
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(1)


def end_process(pid: int, birth: int, dump_path: str) -> None:
    """Kill a process of this machine that cannot end by itself, and remove its stacks, which have been read."""
    if state_of(pid, birth) in ("runs", "stopped"):
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    with suppress(OSError):
        os.unlink(dump_path)


def _stat(pid: int) -> list[str] | None:
    """The fields of `/proc/<pid>/stat` after the name; [] without such a process, None without such a file."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except FileNotFoundError:
        return [] if Path("/proc/self/stat").exists() else None
    except OSError:
        return None


def places_of(thread: int) -> list[Place]:
    """The position of a thread, innermost frame first, at most 100 frames; empty for a thread that has ended.

    All is one call of functions in C, in which no other thread runs: `f_back` of a frame that torch has compiled leads
    to freed memory once the frame has ended. `faulthandler` crashes where it reads a thread that autograd has just
    begun, and that is not complete.
    """
    now = islice(map(methodcaller("get", thread), iter(sys._current_frames, None)), 1)
    frames = accumulate(chain(now, repeat("f_back", _MOST_FRAMES - 1)), _attribute)
    with _uncollected():
        return list(map(_place, takewhile(partial(is_not, None), frames)))


@contextmanager
def _uncollected() -> Iterator[None]:
    """Collect no garbage: Python 3.11 may do so with the lock that threads need to begin, which finalizers wait for."""
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()


def _frames_in(block: str) -> list[Place]:
    """The frames of a thread that `faulthandler` has written."""
    found = re.findall(r'(?m)^  File "([^"\n]+)", line (\S+) in (.+)$', block)
    return [
        (_unescaped(name), int(line) if line.isdigit() else None, _unescaped(function))
        for name, line, function in found
    ]


def _unescaped(text: str) -> str:
    """A name, of which `faulthandler` writes ASCII as it is."""
    return re.sub(r"\\(?:x..|u.{4}|U.{8})", lambda code: chr(int(code[0][2:], 16)), text)


def place_of(places: list[Place]) -> str:
    """`file:line in function` of the innermost frame in the user's own code below Onstep's, else of all frames."""
    of_onstep = [index for index, (name, _, _) in enumerate(places) if name.startswith(_ONSTEP)]
    below = places[: of_onstep[-1]] if of_onstep else places
    own = [one for one in below if not one[0].startswith(("<frozen", _ONSTEP, *_LIBRARIES))]
    for name, line, function in (own or places)[:1]:
        return f"{name}:{line} in {function}"
    return ""


def place_of_error(error: BaseException) -> str:
    """The same for the line that raised an error, even in a data worker, or a `StopIteration` that it stands for."""
    error = error.__cause__ if isinstance(error.__cause__, StopIteration) else error
    frames: list[Place] = [(one.filename, one.lineno, one.name) for one in traceback.extract_tb(error.__traceback__)]
    if frames and frames[-1][0] == f"{_TORCH}/_utils.py" and frames[-1][2] == "reraise":
        listed = re.findall(r'(?m)^ *File "([^"\n]+)", line (\d+), in (\S+)', text_of(error))
        frames = [(name, int(line), function) for name, line, function in listed] or frames
    return place_of(frames[::-1])


def callback_of_error(error: BaseException) -> tuple[str | None, str | None]:
    """The event and callback that raised an error, from the note of the callback manager."""
    for note in reversed(getattr(error, "__notes__", [])):
        found = re.fullmatch(r"raised by callback '(.*)' during '(.*)'", note)
        if found:
            return found[2], found[1]
    return None, None


def waits_in_collective(places: list[Place]) -> bool:
    """Whether the innermost frames, as far as they are torch's, belong to a collective or a backward pass."""
    for name, _, function in places:
        if name in _AWAITING:
            return True
        if not name.startswith(_TORCH):
            return False
        if name.startswith(_COLLECTIVE) or function == "_engine_run_backward":
            return True
    return False


def is_in_collective(places: list[Place]) -> bool:
    """Whether the innermost frame is that of a collective, which computes nothing, as a backward pass may.

    Those of torch's dispatcher do not count: `full_tensor()` waits below them.
    """
    return next((name for name, _, _ in places if not name.startswith(_DISPATCHER)), "") in _CALLS


def waits_for_worker(places: list[Place]) -> bool:
    """Whether the innermost frame outside of the standard library is the data loader's."""
    for name, _, _ in places:
        if name.startswith(_TORCH) or not name.startswith(_LIBRARIES):
            return name.startswith(f"{_TORCH}/utils/data/")
    return False


def is_in_debugger(places: list[Place]) -> bool:
    """Whether a thread is at a debugger's prompt, or an attached debugger may be holding it."""
    debugpy = sys.modules.get("debugpy")
    if debugpy is not None and debugpy.is_client_connected():
        return True
    return any(Path(name).name in ("bdb.py", "pdb.py") for name, _, _ in places)


def stacks_of_threads(left_out: Collection[int]) -> str:
    """The stacks of all Python threads except `left_out`, the main thread's first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    with _uncollected():
        threads = list(chain.from_iterable(islice(iter(sys._current_frames, None), 1)))  # no frame; see `places_of`
    main = threading.main_thread().ident
    return "\n".join(
        f"thread {names.get(thread, thread)}:\n" + _formatted(places_of(thread))
        for thread in sorted(threads, key=lambda thread: thread != main)
        if thread not in left_out
    )


def _formatted(places: list[Place]) -> str:
    return "".join(traceback.format_list([traceback.FrameSummary(*one) for one in places[::-1]]))


class StackDump:
    """A file to which `faulthandler` writes the stacks of this process, or of one of its forked data workers.

    It needs no Python lock, so it works even if a C call never releases the interpreter. With other ranks it begins
    with the page of the heartbeat, and a crash of the process writes its stacks to it.
    """

    def __init__(self, *, is_alone: bool) -> None:
        self._is_alone = is_alone
        _sweep()
        descriptor, self.path = tempfile.mkstemp(prefix=f"{_own_prefix()}{os.getpid()}-{birth_of(os.getpid())}-")
        os.ftruncate(descriptor, PAGE_BYTES)
        self._page = None if is_alone else mmap.mmap(descriptor, PAGE_BYTES)
        self._outer_page = None if is_alone else HEARTBEAT.write_to(self._page)
        self._file = os.fdopen(descriptor, "ab", buffering=0)
        self._sees_crashes = not is_alone and not faulthandler.is_enabled()
        if self._sees_crashes:
            faulthandler.enable(self._file)
        is_free = DUMP_SIGNAL is not None and signal.getsignal(DUMP_SIGNAL) is signal.SIG_DFL
        self._signal = DUMP_SIGNAL if is_free else None
        if self._signal is not None:
            faulthandler.register(self._signal, file=self._file, all_threads=True)

    def renew(self, seconds: float | None) -> None:
        """Make a single process write its stacks to standard error unless this is called again within that time.

        The process then continues: it may only have been stopped for a while, which its threads cannot detect. With
        several ranks, the others request the stacks, and end a rank that does not answer. None disables the limit.
        """
        if self._is_alone and seconds is None:
            faulthandler.cancel_dump_traceback_later()
        elif self._is_alone and seconds is not None:
            faulthandler.dump_traceback_later(seconds, file=_standard_error() or self._file)

    def stacks_of_workers(self) -> str:
        """The stacks of this process's children, which inherited the handler at fork."""
        children = [] if self._signal is None else [one.pid for one in multiprocessing.active_children()]
        return "\n".join(f"data worker {pid}:\n{dumped_by(pid, self.path)}" for pid in children if pid is not None)

    def close(self) -> None:
        """Release the signal and the timer, and remove the file."""
        self.renew(None)
        if self._signal is not None:
            faulthandler.unregister(self._signal)
        if self._sees_crashes:
            faulthandler.disable()
        if self._page is not None:
            HEARTBEAT.write_to(self._outer_page)
            self._page.close()
        self._file.close()
        self.remove()

    def remove(self) -> None:
        """Remove the file, the only trace that `os._exit` would leave."""
        with suppress(OSError):
            os.unlink(self.path)


def dumped_by(pid: int, path: str) -> str:
    """The stacks that a process of this machine writes to its dump file on request; "" if it writes nothing."""
    if DUMP_SIGNAL is None:
        return ""
    file = Path(path)
    try:
        before = file.stat().st_size
        os.kill(pid, DUMP_SIGNAL)
        deadline, size = time.monotonic() + _DUMP_SECONDS, before
        while time.monotonic() < deadline:
            time.sleep(0.05)
            new_size = file.stat().st_size
            if new_size > before and new_size == size:
                break
            size = new_size
        with file.open("rb") as stream:
            stream.seek(before)
            return stream.read().decode(errors="replace")
    except OSError:
        return ""


class LastWords(NamedTuple):
    """What a process has written about itself, even if it is gone."""

    step: int
    """Completed optimizer steps."""
    called: Called | None
    activity: str
    stacks: str
    """The stacks of its crash, if it was one."""


def last_words(descriptor: int) -> LastWords:
    """The last words in the file of a process.

    Raises:
        OSError, ValueError: for a file that cannot be read, or is too short.
    """
    content = os.pread(descriptor, _MOST_DUMP_BYTES, 0)
    if len(content) < PAGE_BYTES:
        raise ValueError(f"a file of {len(content)} bytes has no page")
    return LastWords(*read_page(content[:PAGE_BYTES]), content[PAGE_BYTES:].decode(errors="replace"))


def place_of_crash(stacks: str) -> str:
    """The place of the main thread in stacks that `faulthandler` has written; "" if it is not among them."""
    for block in re.split(r"(?m)^(?=Current thread |Thread )", stacks):
        found = _frames_in(block)
        if found and found[-1][2] != "_bootstrap":  # where the stack of any other thread begins
            return place_of(found)
    return ""


def _own_prefix() -> str:
    """The file name prefix of this machine's processes; the directory may be shared with other containers."""
    return f"onstep-stacks-{zlib.crc32(this_host().encode()):08x}-"


def _sweep() -> None:
    """Remove the files of killed processes once the other ranks have had the time to open them."""
    last_time = time.time() - _NEW_SECONDS
    for path in Path(tempfile.gettempdir()).glob(f"{_own_prefix()}*"):
        pid, _, birth = path.name.removeprefix(_own_prefix()).rpartition("-")[0].partition("-")
        if pid.isdigit() and birth.isdigit() and state_of(int(pid), int(birth)) == "gone":
            with suppress(OSError):
                if path.stat().st_mtime < last_time:
                    path.unlink()


def _standard_error() -> int | None:
    """The process's standard error; None if it is closed."""
    try:
        return None if sys.__stderr__ is None else sys.__stderr__.fileno()
    except (ValueError, OSError):
        return None
