"""Handles signals that mean "save and exit": a handler only sets a flag; the loop acts once all ranks agree."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import FrameType
from typing import TypeGuard

from onstep.distributed import World, shards
from onstep.errors import PREEMPTED, ConfigError
from onstep.processes.heartbeat import ENDING, HEARTBEAT

logger = logging.getLogger(__name__)


REPEAT_WINDOW_SECONDS = 1.0
"""A signal this soon after the first is a repetition of the same request: schedulers signal a whole process group, and
`torchrun` forwards the same signal, so every rank receives it twice."""


def repeat_window_seconds() -> float:
    """How long after the first a signal is its repetition: without end in a batch job of SLURM.

    There SLURM sends the signal to the ranks and to their launcher, which forwards it; further signals may arrive
    before the run has saved, and SIGKILL ends the job anyway.
    """
    is_batch = "SLURM_JOB_ID" in os.environ and not os.isatty(0)
    return math.inf if is_batch else REPEAT_WINDOW_SECONDS


_ERASE_BARS = "\r\x1b[J"
"""Erases the line of a terminal's cursor, which ends with a ^C, and those below."""

_BROKEN = ("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT", "SIGTRAP", "SIGSYS")
_REFUSED = {
    **dict.fromkeys(("SIGKILL", "SIGSTOP"), "no process can handle it"),
    **dict.fromkeys(_BROKEN, "it indicates a broken process"),
    "SIGCHLD": "data workers use it",
    "SIGALRM": "train.data_timeout uses it",
}

Handler = Callable[[int, FrameType | None], object]
Installed = Handler | int | None
"""The result of `signal.getsignal`: None for a handler that was not installed from Python."""


class Preempted(SystemExit):
    """Ends the process with exit code 75, after the run was asked to exit and has saved what it could."""

    def __init__(self, message: str) -> None:
        super().__init__(PREEMPTED)
        self.message = message

    def __str__(self) -> str:
        return self.message


def signal_numbers(names: Iterable[str | int]) -> list[signal.Signals]:
    """The signals with these names (as in `train.exit_signals`) or numbers, each once.

    Raises:
        ConfigError: for a name that does not exist on this system, or a signal that cannot request a graceful stop.
    """
    numbers: dict[signal.Signals, None] = {}
    valid = f"it accepts {', '.join(one.name for one in signal.Signals if one.name not in _REFUSED)}."
    for name in names:
        try:
            number = signal.Signals[name] if isinstance(name, str) else signal.Signals(name)
        except (KeyError, ValueError):
            raise ConfigError(f"train.exit_signals has no signal {name!r}; {valid}") from None
        if number.name in _REFUSED:
            raise ConfigError(f"train.exit_signals must not contain {number.name}: {_REFUSED[number.name]}; {valid}")
        numbers[number] = None
    return list(numbers)


class DistributedSignalHandler:
    """While entered, records that one of some signals was received; on exit restores the previous handlers.

    The handler sets a flag, writes one line to standard error and calls the handler that a user had installed before
    (Python's own for SIGINT is not called). A second signal, later than `repeat_window_seconds()` after the first, ends
    the process at once by that signal's default action. Python runs handlers between two bytecodes: a process that
    hangs in a collective notices neither.

    Handlers are only installed in the main thread; elsewhere rank 0 logs a warning. Entered inside another instance (a
    `train()` within a callback), it installs nothing for signals that the outer one handles, and reports the outer
    one's state. In forked processes these signals set nothing: SIGTERM ends them, others are ignored, so that the
    workers of a data loader continue while the main process finishes its step.

    Args:
        sig: one signal, or several, as numbers, names or `signal.Signals`.
        world: the ranks that `signals_received` queries; None means torch's default process group.

    Raises:
        ConfigError: see `signal_numbers`.
    """

    def __init__(self, sig: int | str | Iterable[int | str] = signal.SIGTERM, *, world: World | None = None) -> None:
        self._signals = signal_numbers([sig] if isinstance(sig, int | str) else sig)
        self._world = world
        self._previous: dict[signal.Signals, Installed] = {}
        self._outer: DistributedSignalHandler | None = None
        self._entries = 0
        self._pid = 0
        self._first_time: float | None = None
        self._first_signal: signal.Signals | None = None
        self._children = _QuietChildren(self)
        self.is_permanent = False
        """Whether it stays installed with nothing to exit it; a later handler replaces it once it has a signal."""
        self.on_first_signal: Callable[[], None] | None = None
        """Called by the handler with the first signal; must be fast and acquire no locks."""
        self.on_lost_worker: Callable[[FrameType | None], None] | None = None
        """Called with the interrupted frame if a data loader's worker has died after the first signal."""

    def __enter__(self) -> DistributedSignalHandler:
        self._entries += 1
        if self._entries == 1:
            self._first_time, self._first_signal = None, None
            self._install()
        return self

    def __exit__(self, *exception: object) -> None:
        self._entries -= 1
        if self._entries == 0:
            self.release()

    @property
    def received(self) -> bool:
        """Whether this process received one of the signals."""
        return self._first_signal is not None or (self._outer is not None and self._outer.received)

    @property
    def signal_name(self) -> str | None:
        """The first signal received, such as `SIGTERM`; None before any."""
        if self._first_signal is not None:
            return self._first_signal.name
        return None if self._outer is None else self._outer.signal_name

    @property
    def is_installed(self) -> bool:
        """Whether signals reach this handler, or the one that it was entered inside of."""
        return bool(self._previous) or (self._outer is not None and self._outer.is_installed)

    @property
    def lost_workers(self) -> bool:
        """Whether a data loader's worker died after the first signal, most likely from the same one."""
        return self._children.has_lost or (self._outer is not None and self._outer.lost_workers)

    @property
    def innermost(self) -> DistributedSignalHandler:
        """The handler that signals reach: this one, or the one that it was entered inside of."""
        return self if self._outer is None or self._previous else self._outer.innermost

    def signals_received(self) -> list[bool]:
        """Whether each rank received one of the signals, in rank order. Collective."""
        world = self._world or World(rank=shards.rank(), size=shards.world_size())
        return [bool(one) for one in world.gather(self.received)]

    def release(self) -> bool:
        """Restore the previous handlers; False if that was already done, or nothing was installed."""
        was_installed = bool(self._previous)
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._handle:  # a handler installed over this one stays
                signal.signal(number, signal.SIG_DFL if previous is None else previous)
        self._previous = {}
        self._outer = None
        self._children.stop()
        return was_installed

    def _install(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            if shards.rank() == 0:
                logger.warning("%s", _off(self._signals))
            return
        self._pid = os.getpid()
        for number in self._signals:
            previous = signal.getsignal(number)
            owner = getattr(previous, "__self__", None)
            if isinstance(owner, DistributedSignalHandler) and owner._pid == self._pid:
                if not (owner.is_permanent and owner.received):
                    self._outer = owner
                    continue
                owner.release()  # its signal was for an earlier training
                previous = signal.getsignal(number)
            self._previous[number] = previous
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Run between two bytecodes of the main thread: without locks, logging, or anything that waits."""
        if os.getpid() != self._pid:
            if number == signal.SIGTERM:
                self._leave_at_once(number)
            return
        now = time.monotonic()
        if self._first_time is not None:
            if now - self._first_time > repeat_window_seconds():
                HEARTBEAT.activity = f"{ENDING} a second {signal.Signals(number).name}"  # for the other ranks
                self._leave_at_once(number)
        else:
            self._first_time, self._first_signal = now, signal.Signals(number)
            self._children.start()
            name = self._first_signal.name
            erase, gap = (_ERASE_BARS, "\n  ") if os.isatty(2) else ("", " ")
            text = f"{erase}Received {name}: saving and stopping after this step"
            if repeat_window_seconds() < math.inf:
                text += f";{gap}a second {name} ends the run without saving"
            with suppress(OSError):  # standard error may be closed
                os.write(2, f"{text}\n".encode())
            if self.on_first_signal is not None:
                self.on_first_signal()
        previous = self._previous.get(signal.Signals(number))
        if _is_users(previous):
            previous(number, frame)

    def _leave_at_once(self, number: int) -> None:
        """End the process as if it had never handled the signal."""
        for one in self._signals:
            signal.signal(one, signal.SIG_DFL)
        signal.raise_signal(number)
        os._exit(128 + number)  # the first process of a container is not killed by its own signals


class _QuietChildren:
    """Keeps the death of a data worker from interrupting the step, once a signal has been received.

    A signal to the process group, as sent by `torchrun`, also ends the workers of a torch DataLoader. Torch then raises
    a RuntimeError in the main thread wherever it is, even in the middle of a save.
    """

    def __init__(self, owner: DistributedSignalHandler) -> None:
        self._owner = owner
        self.has_lost = False
        self._torch_handler: Handler | None = None

    def start(self) -> None:
        current = signal.getsignal(signal.SIGCHLD)
        if getattr(current, "__module__", None) == "torch.utils.data._utils.signal_handling" and callable(current):
            self._torch_handler = current
            signal.signal(signal.SIGCHLD, self._child_ended)

    def stop(self) -> None:
        if self._torch_handler is not None and signal.getsignal(signal.SIGCHLD) == self._child_ended:
            signal.signal(signal.SIGCHLD, self._torch_handler)
        self._torch_handler = None

    def _child_ended(self, number: int, frame: FrameType | None) -> None:
        if self._torch_handler is None:
            return
        try:
            self._torch_handler(number, frame)
        except RuntimeError:  # raised by torch for a dead worker
            self.has_lost = True
            if self._owner.on_lost_worker is not None:
                self._owner.on_lost_worker(frame)


class Interrupts:
    """Detects SIGINT even while the main thread is in C code, where Python cannot raise `KeyboardInterrupt` yet.

    It uses a pipe to which Python's own C handler writes the number of each signal on arrival.

    It is active only if the signal would raise `KeyboardInterrupt` and no other such pipe is installed; else `look`
    always returns False. Must be created and closed in the main thread.
    """

    def __init__(self) -> None:
        self._was_sent = False
        self._ends: tuple[int, int] | None = None
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return
        self._ends = os.pipe()
        for end in self._ends:
            os.set_blocking(end, False)
        others = signal.set_wakeup_fd(self._ends[1], warn_on_full_buffer=False)
        if others != -1:
            signal.set_wakeup_fd(others)
            self.close()

    def look(self) -> bool:
        """Whether SIGINT was sent to this process since this object was created."""
        if self._ends is not None and not self._was_sent:
            with suppress(BlockingIOError):
                self._was_sent = signal.SIGINT in os.read(self._ends[0], 4096)
        return self._was_sent

    def close(self) -> None:
        """Restore the previous signal pipe."""
        ends, self._ends = self._ends, None
        if ends is None:
            return
        present = signal.set_wakeup_fd(-1)
        if present not in (-1, ends[1]):
            signal.set_wakeup_fd(present)
        for end in ends:
            os.close(end)


def _off(signals: Iterable[signal.Signals]) -> str:
    """Say that signals are off in this thread, and what there is in their place."""
    remedy = "run the training in the main thread to enable this"
    if "RAY_JOB_ID" in os.environ:  # a worker of Ray, which runs training in a thread
        remedy = (
            "Ray starts workers that it has ended again (FailureConfig(max_failures)), and the run continues from its "
            "newest checkpoint"
        )
    names = ", ".join(one.name for one in signals)
    return (
        f"signals are off: this training is not in the main thread, where alone Python handles them, so {names} do not "
        f"save and exit; {remedy}"
    )


def _is_users(handler: Installed) -> TypeGuard[Handler]:
    """Whether to call a previous handler: not the default, Python's for SIGINT, or Onstep's of a parent process."""
    if not callable(handler) or handler is signal.default_int_handler or isinstance(handler, signal.Handlers):
        return False
    return not isinstance(getattr(handler, "__self__", None), DistributedSignalHandler)
