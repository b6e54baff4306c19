"""Joins the coordinator's decisions with tensors and disk: executes closed rounds, and commits them.

Everything here lives in one event loop, apart from the tensor work and the writing, for which there is one thread.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import Tensor

from onstep.diloco.protocol.coordinator import Coordinator
from onstep.diloco.protocol.messages import (
    Accepted,
    Await,
    Deregister,
    NotYet,
    Ready,
    Refused,
    Register,
    Reply,
    Request,
    Submit,
)
from onstep.diloco.protocol.rounds import Closed
from onstep.diloco.server.averaging import Contribution
from onstep.diloco.server.masters import Fragment, Version
from onstep.diloco.server.memory import release_holes
from onstep.diloco.server.store import Store
from onstep.diloco.wire.http import WAIT_SECONDS
from onstep.errors import CheckpointError

logger: logging.Logger = logging.getLogger(__name__)

RETRY_SECONDS = 5.0
"""After which a disk that refused is tried again."""
_Key = tuple[int, str, int]
Outcome = TypeVar("Outcome")


@dataclass(frozen=True)
class Result:
    """A reply, and the tensors that go with it: encoded, or those of a version."""

    reply: Reply
    tensors: Mapping[str, Tensor] | None = None


class ServedRun:
    """One run while it is served.

    Args:
        coordinator: decides; called from the loop alone.
        fragments: the parameters, in the coordinator's order.
        store: where everything is kept; None for a run that ends with the process.
        on_commit: called in the thread of the tensor work, with the number of rounds so far, after each commit.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        fragments: Sequence[Fragment],
        store: Store | None = None,
        *,
        on_commit: Callable[[int], None] = lambda num_rounds: None,
    ) -> None:
        self.coordinator = coordinator
        self.fragments = tuple(fragments)
        self.disk_error: str | None = None
        """Why nothing is committed now."""
        self._is_ending = False
        self._store = store
        self._on_commit = on_commit
        self._bodies: dict[_Key, Mapping[str, Tensor]] = {}
        self._saved_revision = coordinator.revision
        self._closed: asyncio.Queue[Closed] = asyncio.Queue()
        self._changed, self._poked = asyncio.Event(), asyncio.Event()
        self._wake = math.inf
        """When the next tick is."""
        self._saving = asyncio.Lock()
        self._tensors = ThreadPoolExecutor(1, thread_name_prefix="onstep-diloco-step")
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="onstep-diloco-save")

    async def serve(self) -> None:
        """Execute rounds until cancelled, then finish the current one. Raises what makes further rounds impossible."""
        self.coordinator.begin(self.now())
        await self.compute(release_holes)
        self._after()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch())
            tasks.create_task(self._execute())

    def close(self) -> None:
        """Wait for what is being computed and written."""
        self._tensors.shutdown()
        self._disk.shutdown()

    @property
    def num_rounds(self) -> int:
        """Versions committed so far, of all fragments."""
        return sum(self.coordinator.versions)

    @property
    def num_bodies(self) -> int:
        """Submissions whose tensors are in memory, waiting for their round."""
        return len(self._bodies)

    def now(self) -> float:
        """The time by the clock that the coordinator goes by."""
        return time.monotonic()

    async def compute(self, work: Callable[[], Outcome]) -> Outcome:
        """Do tensor work aside of the loop, between two rounds."""
        return await asyncio.get_running_loop().run_in_executor(self._tensors, work)

    async def handle(self, request: Request) -> Result:
        """Answer a request without tensors. Who joins or leaves does so durably before it is answered."""
        if isinstance(request, Await):
            return await self._wait(request)
        reply = self.coordinator.handle(request, self.now())
        self._after()
        if isinstance(request, Register | Deregister) and not await self.save_roster():
            return Result(Refused(503, "the disk refuses to save who joins; the server tries again"))
        return Result(reply)

    def submit(self, request: Submit, encoded: Mapping[str, Tensor]) -> Reply:
        """Answer a submission whose tensors were checked; they must not change any more."""
        reply = self.coordinator.handle(request, self.now())
        if isinstance(reply, Accepted) and not reply.is_repeat:
            self._bodies[_key(request)] = encoded
        self._after()
        return reply

    def change(self, act: Callable[[Coordinator, float], Any]) -> Any:
        """Let an operator change what the coordinator decides by."""
        result = act(self.coordinator, self.now())
        self._after()
        return result

    async def _wait(self, request: Await) -> Result:
        """Answer when the version is there, or the time is over."""
        end = self.now() + min(request.wait, WAIT_SECONDS)
        while True:
            reply = self.coordinator.handle(request, self.now())
            if isinstance(reply, Ready):
                return self._with_tensors(reply)
            left = end - self.now()
            if not isinstance(reply, NotYet) or not reply.is_pending or left <= 0:
                return Result(reply)
            changed = self._changed
            try:
                async with asyncio.timeout(left):
                    await changed.wait()
            except TimeoutError:
                continue

    def _with_tensors(self, ready: Ready) -> Result:
        version = self.fragments[ready.fragment].newest
        assert version.number == ready.version
        tensors = version.update if ready.kind == "update" else version.parameters
        return Result(replace(ready, digest=version.digest), tensors)

    def _after(self) -> None:
        """Do what the coordinator's last decision calls for."""
        for closed in self.coordinator.take_closed():
            self._closed.put_nowait(closed)
        wake = self.coordinator.next_wake()
        if wake is not None and wake < self._wake:
            self._poked.set()

    async def _watch(self) -> None:
        """Tick when it is time, or sometimes earlier."""
        while True:
            self._poked.clear()
            wake = self.coordinator.next_wake()
            self._wake = math.inf if wake is None else wake
            try:
                async with asyncio.timeout(None if wake is None else max(0.0, wake - self.now())):
                    await self._poked.wait()
            except TimeoutError:
                self.coordinator.tick(self.now())
                self._after()
                self._wake_waiters()
                await self.save_roster()

    async def _execute(self) -> None:
        while True:
            commit = asyncio.ensure_future(self._commit(await self._closed.get()))
            try:
                await asyncio.shield(commit)
            except asyncio.CancelledError:
                self._is_ending = True
                await commit
                raise

    async def _commit(self, closed: Closed) -> None:
        fragment = self.fragments[closed.fragment]
        contributions = self._take(closed)
        self.coordinator.forget_update(closed.fragment)
        fragment.forget_update()
        version = await self.compute(lambda: _step(fragment, contributions))
        await self._persist(closed, fragment, version)
        fragment.newest = version
        self.coordinator.committed(closed, version.digest, self.now())
        self._after()
        self._wake_waiters()
        num_rounds = self.num_rounds
        await self.compute(lambda: self._on_commit(num_rounds))

    def _take(self, closed: Closed) -> list[Contribution]:
        """The submissions of a round, in an order that does not depend on when they came."""
        ordered = sorted(closed.contributions, key=lambda one: (one.submit.worker_id, one.submit.sequence))
        return [Contribution(self._bodies.pop(_key(one.submit)), one.submit.codec, one.weight) for one in ordered]

    async def _persist(self, closed: Closed, fragment: Fragment, version: Version) -> None:
        """Make the round durable, however long the disk needs."""
        if self._store is None:
            return
        while True:
            try:
                await self._save_round(self._store, closed, fragment, version)
            except CheckpointError as error:
                await self._disk_refused(error)
            else:
                self.disk_error = None
                return

    async def _save_round(self, store: Store, closed: Closed, fragment: Fragment, version: Version) -> None:
        async with self._saving:
            revision = self.coordinator.revision
            rest = rest_of(self.coordinator.state_after(closed, version.digest), self.fragments)
            state = fragment.state_dict(version)
            await self._write(lambda: store.commit(closed.fragment, version.number, state, rest))
            self._saved_revision = revision

    async def save_roster(self) -> bool:
        """Save who is a member, if that has changed; whether it is saved."""
        if self._store is None or self._saved_revision == self.coordinator.revision:
            return True
        try:
            await self._save_rest(self._store)
        except CheckpointError as error:
            logger.error("The roster was not saved; the next round will be saved with it: %s", error)
            return False
        return True

    async def save_change(self) -> None:
        """Save what an operator changed.

        Raises:
            CheckpointError: if the disk refuses; what was changed holds, and is saved with the next round.
        """
        if self._store is not None:
            await self._save_rest(self._store)

    async def _save_rest(self, store: Store) -> None:
        async with self._saving:
            revision = self.coordinator.revision
            rest = rest_of(self.coordinator.state_dict(), self.fragments)
            await self._write(lambda: store.save(rest))
            self._saved_revision = revision

    async def _write(self, work: Callable[[], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._disk, work)

    async def _disk_refused(self, error: CheckpointError) -> None:
        self.disk_error = str(error)
        if self._is_ending:
            raise error
        logger.error("A round waits to be saved, and is tried again every %g s: %s", RETRY_SECONDS, error)
        await asyncio.sleep(RETRY_SECONDS)

    def _wake_waiters(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def rest_of(decided: Mapping[str, Any], fragments: Sequence[Fragment]) -> dict[str, Any]:
    """What is saved apart from tensors: what the coordinator decided, and the rates that an operator may have set."""
    return {**decided, "outer": [part.groups for part in fragments]}


def _step(fragment: Fragment, contributions: list[Contribution]) -> Version:
    version = fragment.step(contributions)
    release_holes()
    return version


def _key(submit: Submit) -> _Key:
    return submit.fragment, submit.worker_id, submit.sequence
