"""What a rank tells the others about itself, outside of the collectives of the training."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch.distributed as dist

from onstep.heartbeat import PULSE
from onstep.training.run import Run
from onstep.training.runs.signals import Interrupts
from onstep.training.watchdog import stacks as rank_stacks

_LOST = ("onnection", "roken pipe", "imed out", "NCCL", "gloo", "ocket", "peer")
_LOOKED_AT_SECONDS = 0.5
"""A rank that has stood still for so long looks at its own stack, to tell where it stands."""


@dataclass
class Failure:
    """An exception that ends the run on one rank."""

    order: int
    """1 for the first rank that published one."""
    kind: str
    """Class of the exception."""
    text: str
    traceback: str
    is_consequence: bool = False
    """It only tells that another rank is gone, as "connection closed by peer"."""


@dataclass
class RankRecord:
    """A rank at one moment: what it does, since when nothing has changed, and how it ended."""

    rank: int
    tick: int = 0
    """Counted up with each publication."""
    step: int = 0
    """Completed optimizer steps."""
    doing: str = ""
    event: str | None = None
    """The moment that is being told, with the callback that is told of it."""
    callback: str | None = None
    place: str = ""
    """Innermost line of the main thread, the user's own where there is one; known once it stands still."""
    beats: int = 0
    """Bits of progress so far."""
    idle_seconds: float = 0.0
    """Seconds without any progress."""
    limit_seconds: float | None = None
    """Seconds without progress after which the rank counts as hung; None where it is not watched."""
    collectives: int = 0
    """Collectives that the rank has entered, over all its process groups."""
    is_waiting: bool = False
    """Its main thread stands inside a collective."""
    waits_for_worker: bool = False
    """Its main thread stands in a data loader."""
    is_debugged: bool = False
    pid: int = 0
    host: str = ""
    """Names the machine and its table of processes; only there `pid` means something."""
    birth: int = 0
    """When the process began, so that no other one is taken for it."""
    dump_path: str = ""
    """Where the stacks go that `faulthandler` writes."""
    is_interrupted: bool = False
    """It was sent SIGINT, and stands where it cannot raise `KeyboardInterrupt` yet."""
    accuses: int | None = None
    """As the judge: a rank that seems to hang, and is to look at itself."""
    accused_beats: int = 0
    """How far that one was then."""
    left: int | None = None
    """Exit code of a rank that is done with the run."""
    failure: Failure | None = None
    silence: float = 0.0
    """As another rank sees it: seconds since it last published anything."""
    is_gone: bool = False
    """Likewise: its process is known not to run any more."""
    is_stopped: bool = False
    """Likewise: its process is known to be stopped, as by SIGSTOP."""

    def encode(self) -> bytes:
        """JSON."""
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def decode(data: bytes) -> RankRecord:
        """What `encode` gave."""
        content = json.loads(data)
        failure = content.pop("failure")
        return RankRecord(**content, failure=None if failure is None else Failure(**failure))

    @property
    def is_over(self) -> bool:
        """Whether the rank has left or failed, so that nothing more is to be expected of it."""
        return self.left is not None or self.failure is not None

    @property
    def idle(self) -> float:
        """Seconds without progress, its silence included."""
        return self.idle_seconds + self.silence

    @property
    def is_stalled(self) -> bool:
        """Whether the rank has stood still for longer than it may."""
        return self.limit_seconds is not None and self.idle_seconds >= self.limit_seconds

    @property
    def activity(self) -> str:
        """What the rank is doing and where, as a clause."""
        where = f" at {self.place}" if self.place else ""
        if self.callback is not None:
            return f"callback '{self.callback}' is told of '{self.event}'{where}"
        if self.is_waiting:
            return f"it waits for other ranks in a collective ({self.doing}){where}"
        return f"it is {self.doing}{where}"


class RankObserver:
    """Looks at the thread that makes it: what it does, since when nothing has changed, and how it has ended.

    Args:
        state: of the run.
        seconds: limit of standing still, outside of the set-up.
        interval: seconds between two looks.
        has_peers: whether there are other ranks to tell of it.
    """

    def __init__(self, state: Run, seconds: float, interval: float, *, has_peers: bool) -> None:
        self._state, self._seconds, self._interval, self._has_peers = state, seconds, interval, has_peers
        self._watched = threading.get_ident()
        self.dump = rank_stacks.StackDump(is_alone=not has_peers)
        self._interrupts = Interrupts() if has_peers else None
        pid = os.getpid()
        self.base = RankRecord(
            state.world.rank,
            pid=pid,
            birth=rank_stacks.birth_of(pid),
            host=rank_stacks.this_host(),
            dump_path=self.dump.path,
            is_debugged=sys.gettrace() is not None,
        )
        self.left: int | None = None
        """Exit code, once this rank is done with the run."""
        self.failed: RankRecord | None = None
        """This rank as it failed."""
        self._beats, self._beat_at = -1, time.monotonic()
        self._limit_before: float | None = None

    def close(self) -> None:
        """Give back what was taken of signals and files."""
        if self._interrupts is not None:
            self._interrupts.close()
        self.dump.close()

    def forgive(self, seconds: float) -> None:
        """Count standing still from later on, by so much."""
        self._beat_at += seconds

    def fail(self, error: BaseException) -> None:
        """Remember where this rank stands and why it fails."""
        text = "".join(traceback.format_exception(error))
        event, callback = rank_stacks.told_of(error)
        self.failed = replace(
            self.record(),
            event=event,
            callback=callback,
            place=rank_stacks.place_of_error(error),
            idle_seconds=0.0,
            failure=Failure(0, type(error).__name__, str(error), text, is_consequence(error)),
        )

    def record(self) -> RankRecord:
        """This rank at this moment, or at that of its failure."""
        if self.failed is not None:
            return replace(self.failed, left=self.left)
        now, told, beats = time.monotonic(), PULSE.told, PULSE.beats
        event, callback = told or (None, None)
        limit = self._limit(told)
        if beats != self._beats or limit != self._limit_before:  # time under another limit, or none, does not count
            self._beats, self._beat_at, self._limit_before = beats, now, limit
        idle = now - self._beat_at
        places = rank_stacks.places_of(self._watched) if idle >= _LOOKED_AT_SECONDS else []
        self.dump.renew(None if limit is None or self.base.is_debugged else limit + 3 * self._interval + 4)
        return replace(
            self.base,
            step=self._state.train_state.step,
            doing=PULSE.doing,
            event=event,
            callback=callback,
            place=rank_stacks.place_of(places),
            beats=beats,
            idle_seconds=idle,
            limit_seconds=limit,
            collectives=_collectives() if self._has_peers else 0,
            is_waiting=self._has_peers and rank_stacks.waits_in_collective(places),
            waits_for_worker=rank_stacks.waits_for_worker(places),
            is_debugged=self.base.is_debugged or rank_stacks.is_in_debugger(places),
            is_interrupted=self._interrupts is not None and self._interrupts.look(),
            left=self.left,
        )

    def stacks(self, left_out: set[int]) -> str:
        """Of all threads but some, and of the data workers."""
        return rank_stacks.stacks_of_threads(left_out) + "\n" + self.dump.stacks_of_workers()

    def is_held(self) -> bool:
        """Whether a debugger may be what makes this rank stand still."""
        return self.base.is_debugged or rank_stacks.is_in_debugger(rank_stacks.places_of(self._watched))

    def _limit(self, told: tuple[str, str] | None) -> float | None:
        """Seconds that this rank may stand still where it is; None in the set-up, but for its callbacks."""
        is_watched = PULSE.phase != "setup" or told is not None
        section = PULSE.section or ("out_of_section" if is_watched else None)
        return self._state.stage.section_limits.get(section or "", self._seconds if is_watched else None)


def is_consequence(error: BaseException) -> bool:
    """Whether an error only tells that a connection to another rank is lost."""
    if not isinstance(error, (RuntimeError, dist.DistError)):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    inner = frames[-1].filename if frames else ""
    is_inside = any(part in inner for part in ("/torch/distributed/", "/torch/autograd/", "/torch/nn/parallel/"))
    return is_inside and any(word in str(error) for word in _LOST)


def _collectives() -> int:
    """Collectives that this rank has entered, over all process groups that it belongs to."""
    groups: Any = dist.distributed_c10d._world.pg_map
    return sum(int(group._get_sequence_number_for_group()) for group in list(groups))
