"""Runs a function on foreign code or data in a child process, with limits on its CPU time and memory."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import select
import signal
import threading
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from onstep.errors import DataError
from onstep.processes.forking import release_in_forked_children

_WAITS_SECONDS = (60, 5)
"""How long the parent waits for an answer. The limit of CPU time is the one that is met in practice; this is for a
child that sleeps, because a thread of the parent held a lock at the fork. The second wait is for a suspended machine,
on which the first one elapses while nothing runs."""
_MAX_MESSAGE = 1_000
"""Number of characters of an error message that the parent receives."""


@dataclass(frozen=True)
class Limits:
    """What one call may use."""

    cpu_seconds: float
    memory_bytes: int
    """Beyond what the parent has mapped at the first call."""


class LimitedProcess:
    """Calls `function` in a child process, which is forked at the first call and ended with this object.

    The kernel enforces the limits, so that they also end a computation within a single operation such as
    ``10 ** 10 ** 9``. CPU time does not depend on how busy the machine is. Calls from several threads take turns. A
    forked child of the parent has a process of its own.

    Args:
        function: called in the child with the argument of `call`; argument and result pass through JSON.
        name: what runs there, for messages.
    """

    def __init__(self, function: Callable[[Any], Any], limits: Limits, name: str) -> None:
        self._function = function
        self._limits = limits
        self._name = name
        self._reset()
        release_in_forked_children(self, LimitedProcess._reset)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._child: _Child | None = None

    def call(self, argument: Any) -> Any:
        """The result of `function(argument)`.

        Raises:
            DataError: if a limit is exceeded, with the limit, or if `function` raises an error, with its message.
        """
        try:
            request = json.dumps(argument).encode()
        except (TypeError, ValueError) as error:
            raise DataError(
                f"{self._name} cannot be given a value that is not JSON: {error}; use text instead"
            ) from error
        with self._lock:
            if self._child is None:
                self._child = _Child(self._function, self._limits)
            try:
                result, problem = self._child.call(request)
            except (EOFError, OSError) as error:
                child, self._child = self._child, None
                raise DataError(f"{self._name} {self._reason(child.ended(isinstance(error, TimeoutError)))}") from None
            except BaseException:  # an interrupted call would leave its answer to the next one
                self._child.end()
                self._child = None
                raise
        if problem is None:
            return result
        raise DataError(f"{self._name} {self._too_large()}" if problem == _NO_MEMORY else problem)

    def _reason(self, status: int | None) -> str:
        """Why the child ended, given what `ended` returned."""
        if status is None:
            return f"did not respond within {_WAITS_SECONDS[0]} seconds; run it again"
        if status == _UNKNOWN:
            return (
                f"ended its process; it may need more than {self._limits.cpu_seconds:g} seconds of CPU time for one "
                "conversation, the limit, or exceed the memory of the machine"
            )
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
            return (
                f"needs more than {self._limits.cpu_seconds:g} seconds of CPU time for one conversation, the limit; "
                "it may loop without end: fix it, or divide the conversation"
            )
        return f"ended its process (wait status {status}); it may exceed the memory of the machine"

    def _too_large(self) -> str:
        return (
            f"needs more than {self._limits.memory_bytes >> 20} MiB of memory for one conversation, the limit; "
            "fix it, or divide the conversation"
        )


_NO_MEMORY = "MemoryError"
_UNKNOWN = -1
"""In place of a wait status."""


class _Child:
    """A running child process and the connection to it."""

    def __init__(self, function: Callable[[Any], Any], limits: Limits) -> None:
        ours, theirs = Pipe()
        with warnings.catch_warnings():
            # From Python 3.12, a fork is warned of if there are other threads. The child uses no lock that they share.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            try:
                ours.close()
                _serve(theirs, function, limits)
            finally:
                os._exit(0)
        theirs.close()
        self._connection = ours
        self._poll = select.poll()
        self._poll.register(ours.fileno(), select.POLLIN)
        self._pid = pid
        self.end = weakref.finalize(self, _end, ours, pid, os.getpid())

    def call(self, request: bytes) -> tuple[Any, str | None]:
        """The result of the function for an argument in JSON, and the message of its error.

        Raises:
            OSError, EOFError: if the process has ended.
            TimeoutError: (an OSError) if it does not respond.
        """
        self._connection.send_bytes(request)
        if not any(self._poll.poll(seconds * 1000) for seconds in _WAITS_SECONDS):
            raise TimeoutError
        result, problem = json.loads(self._connection.recv_bytes())
        return result, problem

    def ended(self, is_running: bool) -> int | None:
        """The wait status of a process that has ended by itself; None for one that had to be killed.

        `_UNKNOWN` if another part of this process has collected it, or SIGCHLD is ignored.
        """
        if is_running:
            self.end()
            return None
        self.end.detach()
        self._connection.close()
        try:
            return os.waitpid(self._pid, 0)[1]
        except ChildProcessError:
            return _UNKNOWN


def _end(connection: Connection, pid: int, owner: int) -> None:
    """End the process; a forked child of the owner closes its end of the connection only."""
    connection.close()
    if os.getpid() == owner:
        with contextlib.suppress(ChildProcessError, ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _serve(connection: Connection, function: Callable[[Any], Any], limits: Limits) -> None:
    """Answer calls until the parent closes its end of the connection."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, even within a single operation
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent, which gets them too, decides what to do
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    gc.freeze()
    _limit_memory(limits.memory_bytes)
    while True:
        try:
            request = connection.recv_bytes()
        except (EOFError, OSError):
            return
        signal.setitimer(signal.ITIMER_PROF, limits.cpu_seconds)
        answer = _answer(function, request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send_bytes(answer)


def _answer(function: Callable[[Any], Any], request: bytes) -> bytes:
    try:
        return json.dumps((function(json.loads(request)), None), ensure_ascii=False).encode("utf-8")
    except MemoryError:
        return json.dumps((None, _NO_MEMORY)).encode()
    except Exception as error:  # noqa: BLE001 - foreign code can raise anything; the parent raises a DataError
        return json.dumps((None, str(error)[:_MAX_MESSAGE])).encode()


def _limit_memory(further_bytes: int) -> None:
    """Let the process map at most `further_bytes` more than now. Linux only; elsewhere, the time limit remains."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except OSError:
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + further_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
