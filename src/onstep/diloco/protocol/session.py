"""Runs a worker's side of the protocol, as operations without sockets or threads."""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from onstep.diloco.protocol.messages import (
    Accepted,
    Await,
    Beat,
    Deregister,
    Dropped,
    Heartbeat,
    NotYet,
    Ready,
    Refused,
    Register,
    Registered,
    Submit,
)
from onstep.diloco.protocol.operations import (
    Answer,
    Delivery,
    Lost,
    Operation,
    RefusedByServerError,
    RoundOpenError,
    Send,
    ServerLostError,
    Sleep,
)

POLL_SECONDS = 20.0
"""How long a server may hold one `Await`."""
LEAST_POLL_SECONDS = 2.0
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 15.0
"""Seconds between two attempts; each pause is twice as long as the one before."""
_AN_ANSWER = "the server's answer"
_ALONE = "start another worker, or the server again with --min-workers and --change-settings"
"""What ends the wait of workers that are fewer than the quorum."""
INCUMBENT_PAUSE = 1.0
"""Seconds between two questions whether another process has this worker's id."""


@dataclass(slots=True)
class Pending:
    """A submission that is neither committed nor dropped, as far as the worker knows."""

    submit: Submit
    body: object
    version: int | None = None
    """The version that will contain it, from the server's `Accepted`."""


class WorkerSession:
    """Numbers a worker's submissions, sends them until the server has them, and asks for the versions they lead to.

    Only one operation may run at a time for each fragment; `beat` may run beside the others.

    Args:
        worker_id: unique in the run.
        session_id: random, new for every start of the worker.
        fingerprint: of the model.
        clock: seconds that never go back.
        lost_seconds: an operation without any answer for this long fails, even before its bound.
        hostname: sent at registration, like `sync_every`, `num_fragments` and `details`.
        poll_seconds: how long the server may hold one `Await`.
        lives: whether the process that has this worker's id lives; None if that cannot be known from here.
    """

    def __init__(
        self,
        worker_id: str,
        session_id: str,
        fingerprint: str,
        *,
        clock: Callable[[], float],
        lost_seconds: float = math.inf,
        hostname: str = "",
        sync_every: int | None = None,
        num_fragments: int | None = None,
        poll_seconds: float = POLL_SECONDS,
        details: Mapping[str, object] | None = None,
        lives: Callable[[Mapping[str, object]], bool | None] = lambda incumbent: False,
    ) -> None:
        self.worker_id, self.id = worker_id, session_id
        self.step = 0
        """Optimizer steps taken, with the kept ones; counted by the owner."""
        self.lost_steps = 0
        """Steps that this session has given up and not submitted; counted by the owner."""
        self.registered: Registered | None = None
        self.superseded: frozenset[int] = frozenset()
        """Fragments of which the server has counted more submissions than the restored state contains: their restored
        local progress must be discarded, or it would count twice."""
        self.num_rejoins = 0
        self.is_lost = False
        """Whether the last operation that ended without an answer was not followed by one."""
        self._num_answers = 0
        self.awaits = _AN_ANSWER
        """What a result is waited for, in words."""
        self._fingerprint, self._clock, self._lost_seconds = fingerprint, clock, lost_seconds
        self._hostname, self._sync_every, self._num_fragments = hostname, sync_every, num_fragments
        self._poll_seconds, self._details, self._lives = poll_seconds, dict(details or {}), lives
        self.command_number = 0
        """Of the newest command for workers that this session has received."""
        self._usual_seconds = math.inf
        """For which the server is to hold an `Await`, by the rounds so far: without an answer then, the line is cut."""
        self._commands: deque[str] = deque()
        self._run_id: str | None = None
        self._next_sequences: dict[int, int] = {}
        self._is_restored = False
        self._pending: dict[int, Pending] = {}
        self.kept_steps = 0
        """Those of an earlier session that this one is going to submit."""
        self.kept_from: int | None = None
        """First sequence number of fragment 0 that an earlier session could not submit, and this one will."""

    def pending(self, fragment: int) -> Submit | None:
        """The fragment's submission that is neither committed nor dropped."""
        found = self._pending.get(fragment)
        return found.submit if found else None

    def join(self, bound: float) -> Operation[Registered]:
        """Register.

        Raises:
            ServerLostError: if no answer comes within the bound.
            RefusedByServerError: if the server refuses this worker.
        """
        return self._join(self._clock() + bound)

    def begin(
        self,
        fragment: int,
        *,
        base_version: int,
        tokens: int,
        steps: int,
        codec: str = "fp32",
        body: object = None,
        loss: float | None = None,
    ) -> Submit:
        """Create the next submission of a fragment; `result` sends it.

        Raises:
            ValueError: if the previous one is still pending.
        """
        if fragment in self._pending:
            raise ValueError(f"the previous submission of fragment {fragment} is still pending; get its result first")
        sequence = self._next_sequences.get(fragment, 0)
        submit = Submit(self.worker_id, self.id, sequence, fragment, base_version, tokens, steps, codec, loss)
        self._pending[fragment] = Pending(submit, body)
        self._next_sequences[fragment] = sequence + 1
        return submit

    def unsent(self, fragment: int) -> tuple[Submit, object]:
        """The pending submission and its body, for another session."""
        pending = self._pending[fragment]
        return pending.submit, pending.body

    def resume(self, submit: Submit, body: object) -> None:
        """Make the submission of an earlier session pending, under its number; after `join`."""
        self._pending[submit.fragment] = Pending(replace(submit, session=self.id), body)
        self._next_sequences[submit.fragment] = submit.sequence + 1

    def result(self, fragment: int, bound: float, have_version: int | None = None) -> Operation[Delivery | Dropped]:
        """Send the pending submission unless the server has it, and wait until it is committed.

        Returns:
            The newest version, which contains the submission; or the server's `Dropped`.

        Raises:
            ServerLostError: if the result is not known within the bound. The submission stays pending, and the next
                call continues.
            RefusedByServerError: if the server refuses.
        """
        until, pending, self.awaits = self._clock() + bound, self._pending[fragment], _AN_ANSWER
        while True:
            if pending.version is None:
                reply = (yield from self._ask(lambda: Send(pending.submit, pending.body), until)).reply
                if isinstance(reply, Dropped):
                    del self._pending[fragment]
                    return reply
                assert isinstance(reply, Accepted)
                pending.version = reply.version
                self.awaits = f"version {reply.version}: the other workers (the server has this worker's submission)"
            answer = yield from self._ask(
                lambda: self._await(fragment, until, have_version, pending.submit.sequence), until
            )
            reply = answer.reply
            if isinstance(reply, Ready):
                del self._pending[fragment]
                return (yield from self._delivered(reply, answer.body, until))
            if isinstance(reply, Dropped):
                del self._pending[fragment]
                return reply
            assert isinstance(reply, NotYet)
            self.awaits = self._described(reply)
            if not reply.is_pending:
                pending.version = None  # the server that accepted it died before the commit
            if self._clock() >= until:
                raise RoundOpenError(f"the round is not committed yet; newest version: {reply.version}")

    def _described(self, reply: NotYet) -> str:
        if self.registered is None or not (reply.missing or reply.num_arrived):
            return f"version {reply.version + 1}"
        settings = self.registered.settings
        has_quorum = reply.num_arrived >= settings.min_workers
        names = ", ".join(reply.missing) or ("the outer step" if has_quorum else "others to join")
        there = f"{reply.num_arrived} of {settings.num_workers} submissions are there, quorum {settings.min_workers}"
        remedy = "" if reply.missing or has_quorum else f"; {_ALONE}"
        return f"version {reply.version + 1}: {names} ({there}{remedy})"

    def note_round(self, seconds: float) -> None:
        """Note how long the last result was waited for: the next one is asked for as often as that calls for."""
        self._usual_seconds = max(LEAST_POLL_SECONDS, 2.0 * seconds)

    def withdraw(self, fragment: int) -> None:
        """Forget a pending submission that the server has refused; its number is not used again."""
        del self._pending[fragment]

    def fetch(self, fragment: int, bound: float) -> Operation[Delivery]:
        """Get the newest version of a fragment. Raises like `join`."""
        until = self._clock() + bound
        answer = yield from self._ask(lambda: self._await(fragment, until), until)
        assert isinstance(answer.reply, Ready)
        return (yield from self._delivered(answer.reply, answer.body, until))

    def _delivered(self, ready: Ready, body: object, until: float) -> Operation[Delivery]:
        """The version, after the commands that this session does not have yet: the round may have been the last."""
        if self.registered is not None and ready.outer_lr is not None and ready.outer_momentum is not None:
            lr, momentum = ready.outer_lr, ready.outer_momentum
            self.registered = replace(self.registered, outer_lr=lr, outer_momentum=momentum)
        if ready.command_number > self.command_number:
            with suppress(ServerLostError):  # the next heartbeat brings them
                yield from self.beat(0.0, until - self._clock())
        return Delivery(ready, body)

    def beat(self, steps_per_second: float, bound: float) -> Operation[Beat]:
        """Send a heartbeat; registers again if the server does not know this worker. Raises like `join`."""

        def heartbeat() -> Send:
            known = self.step, self.command_number, self.lost_steps
            return Send(Heartbeat(self.worker_id, self.id, steps_per_second, *known))

        reply = (yield from self._ask(heartbeat, self._clock() + bound)).reply
        assert isinstance(reply, Beat)
        self.note_commands(reply)
        return reply

    def note_commands(self, beat: Beat) -> None:
        """Keep the commands of an answer for `take_commands`."""
        missing = beat.command_number - self.command_number  # another heartbeat may have brought some meanwhile
        if missing > 0:
            self._commands.extend(beat.commands[-missing:])
            self.command_number = beat.command_number

    @property
    def has_commands(self) -> bool:
        """Whether `take_commands` has some to return."""
        return bool(self._commands)

    def take_commands(self) -> list[str]:
        """The commands that heartbeats have brought since the last call."""
        taken = []
        while self._commands:
            taken.append(self._commands.popleft())
        return taken

    def can_commit(self, fragment: int, beat: Beat) -> bool:
        """Whether the pending submission is committed, or enough workers are registered to commit it."""
        pending = self._pending.get(fragment)
        if pending is None or self.registered is None or self.registered.settings.mode == "async":
            return True
        is_committed = pending.version is not None and beat.versions[fragment] >= pending.version
        return is_committed or beat.num_registered >= self.registered.settings.min_workers

    def leave(self, reason: str = "") -> Operation[bool]:
        """Deregister, with the reason for the server's log, in one attempt; whether the server answered."""
        outcome = yield Send(Deregister(self.worker_id, self.id, self.step, self.lost_steps, reason))
        return isinstance(outcome, Answer) and not isinstance(outcome.reply, Refused)

    def state_dict(self) -> dict[str, object]:
        """JSON-safe. Numbers do not include the submissions of the fragments in `pending`."""
        pending = [one.submit for one in list(self._pending.values())]  # other threads remove some meanwhile
        sequences = self._next_sequences | {submit.fragment: submit.sequence for submit in pending}
        return {
            "run_id": self._run_id,
            "next_sequences": {str(fragment): number for fragment, number in sequences.items()},
            "pending": [submit.fragment for submit in pending],
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue, in a new session and before `join`, from a `state_dict`."""
        sequences, run_id = state["next_sequences"], state["run_id"]
        assert isinstance(sequences, dict)
        self._run_id = None if run_id is None else str(run_id)
        self._next_sequences = {int(fragment): number for fragment, number in sequences.items()}
        self._is_restored = True

    def _await(self, fragment: int, until: float, have_version: int | None = None, sequence: int | None = None) -> Send:
        wait = max(0.0, min(self._poll_seconds, self._usual_seconds, until - self._clock()))
        return Send(Await(self.worker_id, self.id, fragment, 0, have_version, sequence, wait))

    def _ask(self, make: Callable[[], Send], until: float) -> Operation[Answer]:
        """Send until there is an answer, registering again where the server does not know this worker."""
        attempt, answered_at, num_answers = 0, self._clock(), self._num_answers
        while True:
            send = make()
            outcome = yield send
            if isinstance(outcome, Lost):
                self.awaits = _AN_ANSWER
                end = min(until, answered_at + self._lost_seconds)
                self.is_lost = self.is_lost or (self._clock() >= end and self._num_answers == num_answers)
                yield from self._pause(outcome.reason, attempt, end)
            elif outcome is not None:
                self._num_answers += 1
                num_answers, self.is_lost = self._num_answers, False
                refused = outcome.reply
                if not isinstance(refused, Refused):
                    return outcome
                if refused.status not in (404, 503):
                    raise RefusedByServerError(refused.status, refused.error)
                if refused.status == 404 and not isinstance(send.request, Register):
                    yield from self._join(until)
                    self.num_rejoins += 1
                answered_at = self._clock()
                yield from self._pause(refused.error, attempt, until)
            attempt += 1

    def _pause(self, reason: str, attempt: int, until: float) -> Operation[None]:
        """Wait before the next attempt; raises ServerLostError if there is no time left for one."""
        self._check_time(until, reason)
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(attempt, 10)) * self._jitter(attempt)
        yield Sleep(min(pause, until - self._clock()))

    def _jitter(self, attempt: int) -> float:
        """From 0.5 to 1, so that a thousand workers do not come at the same time; repeatable."""
        return 0.5 + zlib.crc32(f"{self.id}/{attempt}".encode()) / 2**33

    def _check_time(self, until: float, reason: str) -> None:
        if self._clock() >= until:
            raise ServerLostError(reason)

    def _join(self, until: float) -> Operation[Registered]:
        offer, asked_at = 0, self._clock()
        while True:
            reply = (yield from self._ask(partial(Send, self._register(offer)), until)).reply
            assert isinstance(reply, Registered)
            if not reply.offer:
                self._note_registration(reply)
                return reply
            self._check_time(until, "another session of this worker's id is registered")
            offer = reply.offer
            if not self._may_replace(reply, self._clock() - asked_at):
                offer = 0
                yield Sleep(INCUMBENT_PAUSE)

    def _may_replace(self, reply: Registered, asked_for: float) -> bool:
        """Whether the session that has this worker's id has ended, as far as anybody knows; raises if it lives."""
        incumbent = reply.incumbent
        if self.registered is not None or not incumbent:
            return True
        is_alive = self._lives(incumbent)
        return may_replace(self.worker_id, incumbent, asked_for, reply.settings.heartbeat_timeout, is_alive)

    def _register(self, offer: int) -> Register:
        return Register(
            self.worker_id,
            self.id,
            self._fingerprint,
            hostname=self._hostname,
            sync_every=self._sync_every,
            num_fragments=self._num_fragments,
            step=self.step,
            offer=offer,
            details=self._details,
            resumes_at=self._resumes_at() if self.registered is None else None,
            kept_steps=self.kept_steps,
        )

    def _resumes_at(self) -> int | None:
        return self._next_sequences.get(0, 0) if self._is_restored else self.kept_from

    def _note_registration(self, registered: Registered) -> None:
        if self._run_id not in (None, registered.run_id):
            raise RefusedByServerError(
                409,
                f"it has another run, {registered.run_id}, than this worker, {self._run_id}; "
                "restart the worker without its saved state, or the server from its own",
            )
        is_first = self.registered is None
        self._run_id, self.registered = registered.run_id, registered
        if not is_first:
            return
        self.command_number = registered.command_number
        known = dict(enumerate(registered.next_sequences))
        if self._is_restored:
            self.superseded = frozenset(one for one in known if known[one] > self._next_sequences.get(one, 0))
        self._next_sequences |= {one: max(number, self._next_sequences.get(one, 0)) for one, number in known.items()}


def may_replace(
    worker_id: str, incumbent: Mapping[str, object], asked_for: float, timeout: float, is_alive: bool | None
) -> bool:
    """Whether the session that has a worker's id has ended, as far as anybody knows.

    Of a process on another machine, that is so once it has been silent for half the time after which it is evicted.

    Args:
        worker_id: the id.
        incumbent: what the server knows of the session, see `Registered.incumbent`.
        asked_for: seconds since it was asked for first.
        timeout: seconds of silence after which a worker is evicted; 0 for never.
        is_alive: whether its process lives; None if that cannot be known from here.

    Raises:
        RefusedByServerError: if it lives.
    """
    silent = incumbent.get("silent_seconds")
    if not isinstance(silent, int | float):
        return True
    if is_alive is None and silent + INCUMBENT_PAUSE < asked_for:  # it has spoken since it was asked for first
        is_alive = True
    if is_alive:
        host = str(incumbent.get("machine"))[:100]
        raise RefusedByServerError(
            409,
            f"worker {worker_id!r} is process {incumbent.get('pid')} on {host}, which is alive; give this one another "
            f"worker_id (--worker-id), or leave it out",
        )
    return is_alive is False or not timeout or silent >= timeout / 2
