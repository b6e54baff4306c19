"""What a rank tells the others about itself, outside of the collectives of the training."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any


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
    phase: str = "setup"
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

    def encode(self) -> bytes:
        """JSON."""
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def decode(data: bytes) -> RankRecord:
        """What `encode` gave; fields of another version are left out."""
        content: dict[str, Any] = json.loads(data)
        failure = content.pop("failure", None)
        known = {one.name for one in fields(RankRecord)}
        record = RankRecord(**{key: value for key, value in content.items() if key in known})
        record.failure = None if failure is None else Failure(**failure)
        return record

    @property
    def activity(self) -> str:
        """What the rank is doing, as a clause."""
        if self.callback is not None:
            return f"callback '{self.callback}' is told of '{self.event}'"
        if self.is_waiting:
            return f"it waits for other ranks in a collective ({self.doing})"
        return f"it is {self.doing}"
