"""Lets one process at a time write a run in an object store: an object that its owner renews, and that can be lost.

No clock is compared with another one: a process that wants the lease watches whether it is renewed, by its own clock,
and replaces it only if it still is the version that was watched. The owner has lost it then: its later renewals fail.
What it still writes is harmless by its `epoch`, see `LeaseState.counts`.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from onstep.errors import LostLeaseError, RunExistsError, StoreError
from onstep.stores.bucket import Bucket, Tag

LEASE = ".run.lease.json"
LOCAL_LOCK = ".run.lease.lock"
"""Beside it in a directory, where objects cannot be replaced on a condition."""
_LOOKS = 6
"""How often a lease is looked at while it is watched."""


@dataclass(frozen=True)
class LeaseState:
    """The content of the object."""

    owner: str
    """Another one for each process that acquires it."""
    who: str
    """The owner in words."""
    epoch: int
    """The number of owners so far."""
    seconds: float
    """The owner has lost its claim if it does not renew the lease for so long."""
    beat: int = 0
    """The number of renewals."""
    is_released: bool = False
    settled: int = 0
    """What owners up to this epoch wrote counts only if `known` has it."""
    known: tuple[str, ...] = ()
    """Names of what counts of earlier owners."""
    upload_seconds: float = 0.0
    """How long the upload of a checkpoint has lasted at most, of whatever owner."""

    def counts(self, name: str, epoch: int) -> bool:
        """Whether what an owner wrote is part of the run: not if the owner had lost the lease by then.

        Args:
            name: its name.
            epoch: the owner's.
        """
        return epoch > self.settled or name in self.known

    def to_bytes(self) -> bytes:
        """The content as JSON."""
        return json.dumps(asdict(self), indent=1).encode()


def parse_lease(content: bytes, url: str) -> LeaseState:
    """The content of a lease.

    Args:
        content: the bytes of the object.
        url: of the run, for messages.

    Raises:
        StoreError: if it is not one.
    """
    try:
        found: dict[str, Any] = json.loads(content)
        return LeaseState(**{**found, "known": tuple(map(str, found["known"]))})
    except (ValueError, TypeError, KeyError):
        raise StoreError(
            f"{url}: {LEASE} is not the lease of a run; delete it if no process works on the run."
        ) from None


class Lease:
    """Held by this process from `take` until `release`, unless it is lost."""

    def __init__(self, bucket: Bucket, state: LeaseState, tag: Tag, lock: FileLock | None) -> None:
        self._bucket, self.state, self._tag, self._lock = bucket, state, tag, lock
        self._turn = threading.Lock()

    @classmethod
    def take(
        cls,
        bucket: Bucket,
        owner: str,
        who: str,
        *,
        seconds: float,
        own: Collection[str] = (),
        report: Callable[[str], None] = lambda _: None,
        wait: Callable[[float], None] = time.sleep,
    ) -> tuple[Lease, LeaseState | None]:
        """Take the lease of a run, and return it with its state before; waits whether a silent owner is alive.

        Args:
            bucket: the run's.
            owner: a name that nobody else has.
            who: this process in words.
            seconds: for how long it may be silent.
            own: earlier owners that are known to have ended.
            report: called with a message before a wait.
            wait: sleeps for a number of seconds.

        Raises:
            RunExistsError: if a live process holds it.
            StoreError: if the store cannot be reached or refuses.
        """
        lock = None if bucket.directory is None else _locked(bucket.url, bucket.directory)
        before: LeaseState | None = None
        while True:
            found = bucket.get(LEASE)
            if found is not None and (there := parse_lease(found[0], bucket.url)).owner == owner:
                return cls(bucket, there, found[1], lock), before  # the answer to an earlier attempt was lost
            if found is None:
                state = LeaseState(owner, who, 1, seconds)
                tag = bucket.create(LEASE, state.to_bytes())
            else:
                before = there
                if not (before.is_released or before.owner in own or lock is not None):
                    _watch(bucket, before, found[1], report, wait)
                kept = replace(before, owner=owner, who=who, seconds=seconds, beat=0, is_released=False)
                state = replace(kept, epoch=before.epoch + 1)
                tag = bucket.swap(LEASE, state.to_bytes(), found[1])
            if tag is not None:
                return cls(bucket, state, tag, lock), before

    @property
    def epoch(self) -> int:
        """Of this owner, from 1."""
        return self.state.epoch

    def renew(self, **changes: Any) -> None:
        """Show that this process is alive.

        Args:
            changes: other fields of the state.

        Raises:
            LostLeaseError: if another process has taken it.
            StoreError: if the store cannot be reached; nothing is known then.
        """
        with self._turn:
            state = replace(self.state, beat=self.state.beat + 1, **changes)
            tag = self._bucket.swap(LEASE, state.to_bytes(), self._tag)
            while tag is None:
                tag = self._again(state)
            self.state, self._tag = state, tag

    def settle(self, names: Iterable[str]) -> None:
        """Decide what of earlier owners is part of the run; what they write from now on is not.

        Args:
            names: what is there by now and counts.
        """
        self.renew(settled=self.epoch - 1, known=tuple(sorted(names)))

    def release(self) -> None:
        """Let the next process in at once; a store that cannot be reached lets it in later."""
        try:
            self.renew(is_released=True)
        finally:
            if self._lock is not None:
                self._lock.release()

    def _again(self, state: LeaseState) -> Tag | None:
        """Replace what is there if it is this process's: an answer was lost, or a request came twice."""
        found = self._bucket.get(LEASE)
        if found is None:
            return self._bucket.create(LEASE, state.to_bytes())
        there = parse_lease(found[0], self._bucket.url)
        if there.owner != state.owner:
            raise LostLeaseError(
                f"{self._bucket.url} was taken over by {there.who}, since this process could not renew its lease for "
                f"{state.seconds:g} s; end one of them."
            )
        return self._bucket.swap(LEASE, state.to_bytes(), found[1])


def _watch(
    bucket: Bucket, state: LeaseState, tag: Tag, report: Callable[[str], None], wait: Callable[[float], None]
) -> None:
    """Wait whether the lease is renewed.

    Raises:
        RunExistsError: if it is.
    """
    report(f"{state.who} was working on {bucket.url}; waiting {state.seconds:g} s for a sign of life")
    for _ in range(_LOOKS):
        wait(state.seconds / _LOOKS)
        found = bucket.get(LEASE)
        if found is None or parse_lease(found[0], bucket.url).is_released:
            return
        if found[1] != tag:
            raise RunExistsError(
                f"{bucket.url} is in use by a live process ({state.who}); wait for it or end it, or choose another "
                f"run.name."
            )


def _locked(url: str, directory: Path) -> FileLock:
    """The lock of a directory, which is made; the system releases it however its holder ends.

    Raises:
        RunExistsError: if a live process holds it.
        StoreError: if it cannot be written.
    """
    lock = FileLock(directory / LOCAL_LOCK, thread_local=False)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        raise RunExistsError(
            f"{url} is in use by a live process; wait for it or end it, or choose another run.name."
        ) from None
    except OSError as error:
        raise StoreError(f"{url}: its lock cannot be written: {error.strerror}.") from None
    return lock
