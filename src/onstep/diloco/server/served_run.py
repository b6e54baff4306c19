"""Joins the coordinator's decisions with tensors and disk: executes closed rounds, and commits them.

Everything here lives in one event loop, apart from the tensor work and the writing, for which there is one thread.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import Tensor

from onstep.console.formats import format_si
from onstep.diloco.outer import nesterov_rates
from onstep.diloco.protocol.coordinator import Coordinator
from onstep.diloco.protocol.messages import (
    Accepted,
    Await,
    Deregister,
    NotYet,
    Ready,
    Refused,
    Register,
    Registered,
    Reply,
    Request,
    Submit,
)
from onstep.diloco.protocol.rounds import Closed
from onstep.diloco.server.averaging import Contribution
from onstep.diloco.server.masters import Fragment, NotFiniteError, Version
from onstep.diloco.server.memory import release_holes
from onstep.diloco.server.screening import Screening, Size
from onstep.diloco.server.store import Store
from onstep.diloco.server.telling import Telling
from onstep.diloco.wire.http import WAIT_SECONDS
from onstep.errors import CheckpointError, require

logger: logging.Logger = logging.getLogger(__name__)

RETRY_SECONDS = 5.0
"""After which a disk that refused is tried again."""
NUM_SHOWN = 10
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
        token_budget: tokens of all workers after which they are to save and stop; None for no end.
        end: ends the server, soon: called when the budget is spent and all workers have left.
        on_commit: called in the thread of the tensor work, with the number of rounds so far, after each commit.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        fragments: Sequence[Fragment],
        store: Store | None = None,
        *,
        on_commit: Callable[[int], None] = lambda num_rounds: None,
        token_budget: int | None = None,
        end: Callable[[], None] = lambda: None,
    ) -> None:
        self.coordinator = coordinator
        self.telling = Telling(self.now(), coordinator.workers, coordinator.absent, len(fragments))
        self._token_budget, self._end = token_budget, end
        self._is_told_of_budget = False
        coordinator.on_member = self._on_member
        coordinator.losses.on_lost = self.telling.lost
        self.fragments = tuple(fragments)
        self.disk_error: str | None = None
        """Why nothing is committed now."""
        self._is_ending = False
        self._store = store
        self._on_commit = on_commit
        self.held_back: deque[dict[str, Any]] = deque(maxlen=NUM_SHOWN)
        """The last submissions that were held back: `worker`, `version` and `reason`."""
        self._bodies: dict[_Key, tuple[Mapping[str, Tensor], float]] = {}
        """Submissions that wait for their round, with their norms."""
        self._screenings = [Screening() for _ in self.fragments]
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
        return Result(replace(reply, **self._rates()) if isinstance(reply, Registered) else reply)

    def _rates(self) -> dict[str, Any]:
        """Of the outer optimizer, for workers that are eager."""
        if not self.coordinator.settings.eager:
            return {}
        lr, momentum = nesterov_rates(self.fragments[0].optimizer)
        return {"outer_lr": lr, "outer_momentum": momentum}

    def submit(self, request: Submit, encoded: Mapping[str, Tensor], norm: float = 0.0) -> Reply:
        """Answer a submission whose tensors were checked; they must not change any more."""
        reply = self.coordinator.handle(request, self.now())
        if isinstance(reply, Accepted) and not reply.is_repeat:
            self._bodies[_key(request)] = encoded, norm
        self._after()
        return reply

    def change(self, act: Callable[[Coordinator, float], Any]) -> Any:
        """Let an operator change what the coordinator decides by."""
        result = act(self.coordinator, self.now())
        self._after()
        return result

    def versions(self) -> list[int]:
        """The versions to which an operator can go back: those before the newest that are kept of all fragments."""
        if self._store is None:
            return []
        kept = [set(self._store.versions(number)) - {part.newest.number} for number, part in enumerate(self.fragments)]
        return sorted(set.intersection(*kept))

    def go_back(self, version: int) -> None:
        """Make an earlier version of all fragments their next one, soon.

        Raises:
            ConfigError: for a version that is not kept, or while a round is being committed.
        """
        kept = self.versions()
        require(version in kept, "version", f"one of those kept ({', '.join(map(str, kept)) or 'none'})", version)
        self.change(lambda coordinator, now: coordinator.go_back(version, now))

    async def _wait(self, request: Await) -> Result:
        """Answer when the version is there, or the time is over."""
        end = self.now() + min(request.wait, WAIT_SECONDS)
        while True:
            reply = self.coordinator.handle(request, self.now())
            if isinstance(reply, Ready):
                return self._with_tensors(reply)
            left = end - self.now()
            if not isinstance(reply, NotYet) or not reply.is_pending:
                return Result(reply)
            if left <= 0:
                return Result(self.coordinator.explained(reply, request.fragment))
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
        return Result(replace(ready, digest=version.digest, **self._rates()), tensors)

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
        num_bytes = sum(_num_bytes(self._bodies[_key(one.submit)][0]) for one in closed.contributions)
        closed = self._screened(closed)
        contributions = self._take(closed)
        self.coordinator.forget_update(closed.fragment)
        fragment.forget_update()
        closed, version = await self._next_version(closed, fragment, contributions)
        await self._persist(closed, fragment, version)
        fragment.newest = version
        self.coordinator.committed(closed, version.digest, self.now())
        missing = sorted(set(self.coordinator.workers) - set(closed.contributors))
        self.telling.round(closed, self.coordinator.tokens, num_bytes, self.now(), missing)
        self._keep_to_budget()
        if version.update is None:
            self.coordinator.forget_update(closed.fragment)
        self._after()
        self._wake_waiters()
        num_rounds = self.num_rounds
        await self.compute(lambda: self._on_commit(num_rounds))

    def _on_member(self, kind: str, worker_id: str, reason: str) -> None:
        coordinator = self.coordinator
        num_registered, num_workers = len(coordinator.workers), coordinator.settings.num_workers
        is_gone = worker_id not in coordinator.workers
        open_steps = coordinator.open_steps(worker_id) if is_gone else 0
        self.telling.member(kind, worker_id, reason, open_steps, num_registered, num_workers, self.now())
        if not num_registered and self._is_spent:
            logger.info("The token budget is spent and all workers have left; the server ends")
            self._end()
        elif not num_registered:
            logger.info("No worker is there: there is no round until one joins, and the server waits for it")

    @property
    def _is_spent(self) -> bool:
        return self._token_budget is not None and self.coordinator.tokens >= self._token_budget

    def _keep_to_budget(self) -> None:
        """Tell the workers to save and stop once the budget is spent; those that join later, after their next round."""
        if self._is_spent:
            if not self._is_told_of_budget:
                spent = f"{format_si(self.coordinator.tokens)} of {format_si(self._token_budget or 0)}"
                logger.info("The token budget is spent (%s): the workers are to save and stop", spent)
                self._is_told_of_budget = True
            self.coordinator.command("save_and_stop")

    def _screened(self, closed: Closed) -> Closed:
        """A round without the submissions that do not count."""
        if closed.restores is not None:
            reason = f"an operator went back to version {closed.restores}"
            return self._hold_back(closed, dict.fromkeys(range(len(closed.contributions)), reason))
        submits = [one.submit for one in closed.contributions]
        sizes = [Size(self._bodies[_key(submit)][1], submit.steps) for submit in submits]
        return self._hold_back(closed, self._screenings[closed.fragment].far(sizes))

    def _take(self, closed: Closed) -> list[Contribution]:
        """The submissions of a round, in an order that does not depend on when they came."""
        ordered = sorted(closed.contributions, key=lambda one: (one.submit.worker_id, one.submit.sequence))
        return [
            Contribution(self._bodies.pop(_key(one.submit))[0], one.submit.codec, one.weight, one.scale)
            for one in ordered
        ]

    def _hold_back(self, closed: Closed, reasons: Mapping[int, str]) -> Closed:
        for index, reason in reasons.items():
            submit = closed.contributions[index].submit
            self._bodies.pop(_key(submit), None)
            worker_id = submit.worker_id
            logger.warning("Held back from version %d the submission of %s: %s", closed.version, worker_id, reason)
            self.held_back.append({"worker": worker_id, "version": closed.version, "reason": reason})
        return self.coordinator.hold_back(closed, reasons)

    async def _next_version(
        self, closed: Closed, fragment: Fragment, contributions: list[Contribution]
    ) -> tuple[Closed, Version]:
        """The version that a round leads to: after an outer step, or an earlier one once more."""
        if closed.restores is not None:
            return closed, await self._restored(closed, fragment, closed.restores)
        if not contributions:
            return closed, replace(fragment.newest, number=closed.version, update=None)
        try:
            return closed, await self.compute(lambda: _step(fragment, contributions, closed.is_mean))
        except NotFiniteError as error:
            logger.error("Version %d is version %d once more: %s", closed.version, fragment.newest.number, error)
            closed = self._hold_back(closed, dict.fromkeys(range(len(closed.contributions)), str(error)))
            return closed, await self._restored(closed, fragment, fragment.newest.number)

    async def _restored(self, closed: Closed, fragment: Fragment, number: int) -> Version:
        """An earlier version as the next one, with the current rates; without a disk the newest, without momentum."""
        groups, before, store = fragment.groups, fragment.newest, self._store

        def restore() -> Version:
            if store is None:
                fragment.begin_again()
                return before
            fragment.load_state_dict(store.read(closed.fragment, number))
            fragment.set_groups(groups)
            restored, fragment.newest = fragment.newest, before
            return restored

        return replace(await self.compute(restore), number=closed.version, update=None)

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


def _step(fragment: Fragment, contributions: list[Contribution], is_mean: bool) -> Version:
    version = fragment.step(contributions, is_mean)
    release_holes()
    return version


def _num_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(one.nbytes for one in tensors.values())


def _key(submit: Submit) -> _Key:
    return submit.fragment, submit.worker_id, submit.sequence
