"""Defines the report that each rank publishes about itself, and the observer that builds it."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch.distributed as dist

from onstep.errors import ConfigError, RanksApartError, text_of
from onstep.processes.heartbeat import ENDING, HEARTBEAT, Called
from onstep.training.run import Run
from onstep.training.runs.signals import Interrupts
from onstep.training.runs.stage import SectionLimits
from onstep.training.watchdog import stacks as rank_stacks

_LOST = ("onnection", "roken pipe", "imed out", "NCCL", "gloo", "ocket", "peer")
_INSIDE = ("/torch/distributed/", "/torch/autograd/", "/torch/nn/parallel/", "/onstep/distributed/")
TERMINATED = f"{ENDING} SIGTERM"
"""The last activity of a rank that leaves an evaluation because of that signal."""
FIRST_STEP = 1.5
"""How many times as long a rank may be without progress until the first step is done."""
_LOOKED_AT_SECONDS = 0.5
"""A rank without progress for this long inspects its own stack, to report where it is."""


@dataclass
class Failure:
    """An exception that ends the run on one rank."""

    order: int
    """1 for the first rank that published a failure."""
    kind: str
    """Class of the exception."""
    text: str
    traceback: str
    is_consequence: bool = False
    """It only indicates that another rank is gone, as "connection closed by peer" does."""
    is_refusal: bool = False
    """It says in one line what is configured or called wrong; stacks add nothing."""


@dataclass
class RankReport:
    """The state of a rank at one time: its activity, how long nothing has changed, and how it ended."""

    rank: int
    tick: int = 0
    """Incremented with each publication."""
    step: int = 0
    """Completed optimizer steps."""
    activity: str = ""
    event: str | None = None
    """The event being handled, and the callback that handles it."""
    callback: str | None = None
    place: str = ""
    """Innermost line of the main thread, in the user's own code if possible; known once progress stops."""
    beats: int = 0
    """Heartbeats so far."""
    idle_seconds: float = 0.0
    """Seconds without any progress."""
    limit_seconds: float | None = None
    """Seconds without progress after which the rank counts as hung; None if it is not watched."""
    collectives: dict[str, int] = field(default_factory=dict)
    """Number of collectives that the rank has entered in each of its process groups, by the name of the group."""
    entered_in_callbacks: int = 0
    """Those among them that callbacks have entered in the set-up."""
    entered_by: str = ""
    """The callback that was the last to do so, and the event."""
    is_alone_there: bool = False
    """As seen with the others: its callbacks have entered more collectives than those of another rank."""
    is_waiting: bool = False
    """Its main thread is inside a collective."""
    is_in_collective: bool = False
    """Likewise, and it computes nothing meanwhile."""
    waits_for_worker: bool = False
    """Its main thread is in a data loader."""
    is_debugged: bool = False
    pid: int = 0
    host: str = ""
    """Identifies the machine and its process table; `pid` is only meaningful there."""
    birth: int = 0
    """When the process began, so that no other process is mistaken for it."""
    dump_path: str = ""
    """File to which `faulthandler` writes the stacks."""
    is_interrupted: bool = False
    """It received SIGINT at a place where it cannot raise `KeyboardInterrupt` yet."""
    suspects: int | None = None
    """On the diagnosing rank: a rank that seems to hang and should check itself."""
    suspected_beats: int = 0
    """How far that rank was at that time."""
    is_done: bool = False
    """It has reached the end of the run without an error, and waits for the others to do so."""
    left: int | None = None
    """Exit code of a rank that has left the run."""
    knows_diagnosis: bool = False
    """It has read the diagnosis that all ranks act on."""
    failure: Failure | None = None
    silence: float = 0.0
    """As seen by another rank: seconds since it last published anything."""
    step_of_others: int = 0
    """Likewise: the greatest step that any rank has reported."""
    is_gone: bool = False
    """Likewise: its process is known to have ended."""
    is_final: bool = False
    """Likewise: this is what the process did when it ended, not what it last reported."""
    is_stopped: bool = False
    """Likewise: its process is known to be stopped, for example by SIGSTOP."""

    def encode(self) -> bytes:
        """JSON."""
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def decode(data: bytes) -> RankReport:
        """The inverse of `encode`."""
        content = json.loads(data)
        failure = content.pop("failure")
        return RankReport(**content, failure=None if failure is None else Failure(**failure))

    @property
    def is_over(self) -> bool:
        """Whether the rank has left or failed, so that it will publish nothing more."""
        return self.left is not None or self.failure is not None

    @property
    def has_left_early(self) -> bool:
        """Whether the rank has exited, with any code, before it reached the end of the run."""
        return self.left is not None and self.failure is None and not self.is_done

    @property
    def is_terminated(self) -> bool:
        """Whether SIGTERM has ended the rank, which launchers send to the others once one is gone."""
        return self.activity == TERMINATED

    @property
    def idle(self) -> float:
        """Seconds without progress, including its silence."""
        return self.idle_seconds + self.silence

    @property
    def is_stalled(self) -> bool:
        """Whether the rank has made no progress for longer than allowed."""
        return self.limit_seconds is not None and self.idle_seconds >= self.limit_seconds

    def at_last(self, words: rank_stacks.LastWords) -> RankReport:
        """This record of a rank that publishes nothing more, with what its process writes whenever that changes."""
        event, callback = words.called or (None, None)
        place = rank_stacks.place_of_crash(words.stacks)
        return replace(
            self,
            step=words.step,
            event=event,
            callback=callback,
            activity=words.activity,
            place=place,
            is_waiting=False,
            is_final=self.is_gone,
        )

    @property
    def clause(self) -> str:
        """The rank's current activity and place, as a clause."""
        where = f" at {self.place}" if self.place else ""
        if self.callback is not None and not self.activity.startswith(ENDING):
            return f"callback '{self.callback}' is handling '{self.event}'{where}"
        if self.is_waiting:
            waits = f"it waits for other ranks in a collective ({self.activity}){where}"
            return f"{waits}, after {self.entered_by}, which other ranks did not" if self.is_alone_there else waits
        return f"it is {self.activity}{where}"


class RankObserver:
    """Observes the thread that creates it: what it does, since when nothing has changed, and how it has ended.

    Args:
        state: the run's state.
        seconds: limit without progress, outside of the set-up.
        interval: seconds between two observations.
        has_peers: whether there are other ranks to report to.
    """

    def __init__(self, state: Run, seconds: float, interval: float, *, has_peers: bool) -> None:
        self._state, self._seconds, self._interval, self._has_peers = state, seconds, interval, has_peers
        self._watched = threading.get_ident()
        self.dump = rank_stacks.StackDump(is_alone=not has_peers)
        self._interrupts = Interrupts() if has_peers else None
        pid = os.getpid()
        self.base = RankReport(
            state.world.rank,
            pid=pid,
            birth=rank_stacks.birth_of(pid),
            host=rank_stacks.this_host(),
            dump_path=self.dump.path,
            is_debugged=sys.gettrace() is not None,
        )
        self.left: int | None = None
        """Exit code, once this rank has left the run."""
        self.is_done = False
        """Whether this rank has reached the end of the run, and waits for the others."""
        self._last: RankReport | None = None
        """This rank's record from the time of its failure or exit."""
        self._beats, self._beat_at = -1, time.monotonic()
        self._limit_before: float | None = None
        self._entered_before, self._entered_in_callbacks, self._entered_by = 0, 0, ""
        if has_peers:
            HEARTBEAT.follow(self._observe_callback)

    def close(self) -> None:
        """Release the signals and files in use."""
        HEARTBEAT.follow(None)
        if self._interrupts is not None:
            self._interrupts.close()
        self.dump.close()

    def _observe_callback(self, called: Called | None) -> None:
        """A callback of the set-up begins or ends: note the step, and count the collectives that it has entered.

        Where only some ranks enter them, later ones do not match.
        """
        HEARTBEAT.step = self._state.train_state.step
        count, before = sum(_collectives().values()), HEARTBEAT.callback
        if before is not None and count > self._entered_before:
            self._entered_in_callbacks += count - self._entered_before
            self._entered_by = f"callback '{before[1]}' entered a collective while handling '{before[0]}'"
        self._entered_before = count

    def forgive(self, seconds: float) -> None:
        """Measure the time without progress from a time later by this much."""
        self._beat_at += seconds

    @property
    def has_failed(self) -> bool:
        """Whether an error has ended the run on this rank."""
        return self._last is not None and self._last.failure is not None

    def fail(self, error: BaseException) -> None:
        """Record where this rank is and why it fails."""
        text = "".join(traceback.format_exception(error))
        is_refusal = isinstance(error, ConfigError)
        failure = Failure(0, type(error).__name__, text_of(error), text, is_consequence(error), is_refusal)
        self._last = replace(self._at(error), failure=failure)

    def leave(self, leaving: SystemExit) -> None:
        """Record where this rank exits, and its exit code."""
        code = leaving.code
        self._last = self._at(leaving)
        self.left = code if isinstance(code, int) else int(code is not None)

    def _at(self, error: BaseException) -> RankReport:
        """This rank's record at the place that has raised this."""
        event, callback = rank_stacks.callback_of_error(error)
        place = rank_stacks.place_of_error(error)
        return replace(self.record(), event=event, callback=callback, place=place, idle_seconds=0.0)

    def record(self) -> RankReport:
        """This rank's current record, or that of its failure or exit."""
        if self._last is not None:
            return replace(self._last, left=self.left)
        now, called, beats = time.monotonic(), HEARTBEAT.callback, HEARTBEAT.beats
        event, callback = called or (None, None)
        limit = self._limit(called)
        if beats != self._beats or limit != self._limit_before:  # time under another limit does not count
            self._beats, self._beat_at, self._limit_before = beats, now, limit
        idle = now - self._beat_at
        places = rank_stacks.places_of(self._watched) if idle >= _LOOKED_AT_SECONDS else []
        self.dump.renew(None if limit is None or self.base.is_debugged else limit + 3 * self._interval + 4)
        return replace(
            self.base,
            step=self._state.train_state.step,
            activity=HEARTBEAT.activity,
            event=event,
            callback=callback,
            place=rank_stacks.place_of(places),
            beats=beats,
            idle_seconds=idle,
            limit_seconds=limit,
            collectives=_collectives() if self._has_peers else {},
            entered_in_callbacks=self._entered_in_callbacks,
            entered_by=self._entered_by,
            is_waiting=self._has_peers and rank_stacks.waits_in_collective(places),
            is_in_collective=self._has_peers and rank_stacks.is_in_collective(places),
            waits_for_worker=rank_stacks.waits_for_worker(places),
            is_debugged=self.base.is_debugged or rank_stacks.is_in_debugger(places),
            is_interrupted=self._interrupts is not None and self._interrupts.look(),
            is_done=self.is_done,
            left=self.left,
        )

    def stacks(self, left_out: set[int]) -> str:
        """The stacks of all threads except `left_out`, and of the data workers."""
        return rank_stacks.stacks_of_threads(left_out) + "\n" + self.dump.stacks_of_workers()

    def is_held(self) -> bool:
        """Whether a debugger may be the reason that this rank makes no progress."""
        return self.base.is_debugged or rank_stacks.is_in_debugger(rank_stacks.places_of(self._watched))

    def _limit(self, called: tuple[str, str] | None) -> float | None:
        """Seconds that this rank may be without progress here; None in the set-up, except in its callbacks.

        Longer until the first step is done, which may compile the model.
        """
        is_watched = HEARTBEAT.phase == "training" or called is not None
        section = HEARTBEAT.section or ("out_of_section" if is_watched else None)
        seconds = self._seconds if self._state.stage.has_stepped or called is not None else FIRST_STEP * self._seconds
        return self._state.features.room(SectionLimits).get(section or "", seconds if is_watched else None)


def is_consequence(error: BaseException) -> bool:
    """Whether an error only indicates that another rank is gone, or elsewhere."""
    if isinstance(error, RanksApartError):
        return True
    if not isinstance(error, (RuntimeError, dist.DistError)):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    inner = frames[-1].filename if frames else ""
    is_inside = any(part in inner for part in _INSIDE)
    return is_inside and any(word in text_of(error) for word in _LOST)


def _collectives() -> dict[str, int]:
    """Number of collectives that this rank has entered in each process group; with gloo, what stages send counts too.

    Names of groups are the same on all ranks.
    """
    names: Any = dist.distributed_c10d._world.pg_names
    return {name: int(group._get_sequence_number_for_group()) for group, name in list(names.items())}
