"""A worker's side of the protocol, as generators without sockets or threads.

A driver runs them: it performs what they yield and sends the outcome back. `Send` is answered by `Answer` or `Lost`,
`Sleep` by anything. Every operation has a bound in seconds, kept by an injected clock; a driver's own time-outs for one
request should be well below it.

    operation = session.settle(fragment, bound=60.0)
    outcome = None
    try:
        while True:
            outcome = perform(operation.send(outcome))
    except StopIteration as done:
        return done.value
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import TypeVar

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
    Reply,
    Request,
    Submit,
)
from onstep.errors import OnstepError

POLL_SECONDS = 20.0
"""How long a server may hold one question for a version."""
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 15.0
"""Seconds between two attempts; each pause is twice as long as the one before."""


class SessionEndedError(OnstepError):
    """The server refused this worker for good: another model or run, a wrong token, or a newer session of its id.

    `status` is that of the refusal.
    """

    def __init__(self, reason: str, status: int = 409) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True, slots=True)
class Send:
    """Send a request, with `body`, which is the driver's own, unless it is None."""

    request: Request
    body: object = None


@dataclass(frozen=True, slots=True)
class Sleep:
    """Wait."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Answer:
    """What the server replied; `body` is the driver's own."""

    reply: Reply
    body: object = None


@dataclass(frozen=True, slots=True)
class Lost:
    """No answer came; whether the server has the request is unknown."""

    reason: str


@dataclass(frozen=True, slots=True)
class Counted:
    """The submission is in a committed version; `ready` and `body` are the newest one."""

    ready: Ready
    body: object = None


@dataclass(frozen=True, slots=True)
class NotCounted:
    """The submission was dropped, and no version will have it."""

    reason: str
    version: int
    """Newest version of the fragment."""


@dataclass(frozen=True, slots=True)
class Unsettled:
    """Not known yet: the bound passed. The submission stays, `settle` continues where this one ended."""

    reason: str


Effect = Send | Sleep
Outcome = Answer | Lost | None
Settlement = Counted | NotCounted | Unsettled
T = TypeVar("T")
Operation = Generator[Effect, Outcome, T]


@dataclass(slots=True)
class Pending:
    """A submission whose fate is not known."""

    submit: Submit
    body: object
    version: int | None = None
    """The version that will have it, as the server said when it accepted it."""


class _OutOfTimeError(Exception):
    """The bound of an operation passed."""


class WorkerSession:
    """What a worker has submitted, what became of it, and how to find out.

    One operation at a time, but `beat`, which may run beside others: it changes nothing that they use.
    """

    def __init__(
        self,
        worker_id: str,
        session: str,
        fingerprint: str,
        *,
        clock: Callable[[], float],
        hostname: str = "",
        sync_every: int | None = None,
        num_fragments: int | None = None,
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        self.worker_id = worker_id
        self.session = session
        self.step = 0
        """Optimizer steps taken; kept by the owner."""
        self.registered: Registered | None = None
        self.superseded: frozenset[int] = frozenset()
        """Fragments of which the server has counted more than the restored state knows: their restored local progress
        must be discarded, or it would count twice."""
        self.num_rejoins = 0
        self.num_resent = 0
        self._fingerprint = fingerprint
        self._clock = clock
        self._hostname, self._sync_every, self._num_fragments = hostname, sync_every, num_fragments
        self._poll_seconds = poll_seconds
        self._run_id: str | None = None
        self._next_sequences: dict[int, int] = {}
        self._is_restored = False
        self._pending: dict[int, Pending] = {}

    def pending(self, fragment: int) -> Submit | None:
        """The submission whose fate is not known."""
        found = self._pending.get(fragment)
        return found.submit if found else None

    def join(self, bound: float) -> Operation[Registered | Unsettled]:
        """Register, trying until the bound passes.

        Raises:
            SessionEndedError: if the server refuses this worker.
        """
        try:
            return (yield from self._join(self._clock() + bound))
        except _OutOfTimeError as error:
            return Unsettled(str(error))

    def begin(
        self, fragment: int, *, base_version: int, tokens: int, steps: int, codec: str = "fp32", body: object = None
    ) -> Submit:
        """Make the next submission of a fragment; `settle` sends it.

        Raises:
            ValueError: if the one before is not settled.
        """
        if fragment in self._pending:
            raise ValueError(f"the submission of fragment {fragment} before this one is not settled; settle it first")
        sequence = self._next_sequences.get(fragment, 0)
        submit = Submit(self.worker_id, self.session, sequence, fragment, base_version, tokens, steps, codec)
        self._pending[fragment] = Pending(submit, body)
        self._next_sequences[fragment] = sequence + 1
        return submit

    def settle(self, fragment: int, bound: float, have_version: int | None = None) -> Operation[Settlement]:
        """Send the pending submission if the server does not have it, and wait until it is committed.

        Raises:
            SessionEndedError: if the server refuses this worker.
        """
        until = self._clock() + bound
        try:
            while True:
                settlement = yield from self._settle_once(self._pending[fragment], until, have_version)
                if settlement is not None:
                    del self._pending[fragment]
                    return settlement
        except _OutOfTimeError as error:
            return Unsettled(str(error))

    def withdraw(self, fragment: int) -> None:
        """Forget a pending submission that the server has refused; its number is not used again."""
        del self._pending[fragment]

    def fetch(
        self, fragment: int, bound: float, *, version: int = 0, have_version: int | None = None
    ) -> Operation[Answer | Unsettled]:
        """The newest version of a fragment, once it is at least `version`; the answer's reply is a Ready.

        Raises:
            SessionEndedError: if the server refuses this worker.
        """
        until = self._clock() + bound
        try:
            while True:
                answer = yield from self._ask(
                    lambda: self._question(fragment, version, have_version, None, until), until
                )
                if isinstance(answer.reply, Ready):
                    return answer
                self._check_time(until, f"version {version} of fragment {fragment} is not there yet")
        except _OutOfTimeError as error:
            return Unsettled(str(error))

    def beat(self, steps_per_second: float, bound: float) -> Operation[Beat | Unsettled]:
        """Give a sign of life; registers again if the server does not know this worker.

        Raises:
            SessionEndedError: if the server refuses this worker.
        """
        until = self._clock() + bound
        beat = Heartbeat(self.worker_id, self.session, steps_per_second, self.step)
        try:
            reply = (yield from self._ask(lambda: Send(beat), until)).reply
        except _OutOfTimeError as error:
            return Unsettled(str(error))
        assert isinstance(reply, Beat)
        return reply

    def can_settle(self, fragment: int, beat: Beat) -> bool:
        """Whether the pending submission is committed, or there are enough workers to commit it."""
        pending = self._pending.get(fragment)
        if pending is None or self.registered is None or self.registered.settings.mode == "async":
            return True
        is_committed = pending.version is not None and beat.versions[fragment] >= pending.version
        return is_committed or beat.num_registered >= self.registered.settings.min_workers

    def leave(self) -> Operation[bool]:
        """Deregister, trying once; whether the server answered."""
        outcome = yield Send(Deregister(self.worker_id, self.session))
        return isinstance(outcome, Answer) and not isinstance(outcome.reply, Refused)

    def state_dict(self) -> dict[str, object]:
        """JSON-safe. The submissions of the fragments in `pending` are as if they had not begun."""
        pending = [one.submit for one in list(self._pending.values())]  # other threads settle them
        sequences = self._next_sequences | {submit.fragment: submit.sequence for submit in pending}
        return {
            "run_id": self._run_id,
            "next_sequences": {str(fragment): number for fragment, number in sequences.items()},
            "pending": [submit.fragment for submit in pending],
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue, in a new session and before `join`, from what `state_dict` returned."""
        sequences, run_id = state["next_sequences"], state["run_id"]
        assert isinstance(sequences, dict)
        self._run_id = None if run_id is None else str(run_id)
        self._next_sequences = {int(fragment): number for fragment, number in sequences.items()}
        self._is_restored = True

    def _settle_once(
        self, pending: Pending, until: float, have_version: int | None
    ) -> Operation[Counted | NotCounted | None]:
        submit = pending.submit
        if pending.version is None:
            reply = (yield from self._ask(lambda: Send(submit, pending.body), until)).reply
            if isinstance(reply, Dropped):
                return NotCounted(reply.reason, reply.version)
            assert isinstance(reply, Accepted)
            pending.version = reply.version
        answer = yield from self._ask(
            lambda: self._question(submit.fragment, 0, have_version, submit.sequence, until), until
        )
        reply = answer.reply
        if isinstance(reply, Ready):
            return Counted(reply, answer.body)
        assert isinstance(reply, NotYet)
        if not reply.is_pending:
            pending.version = None
            self.num_resent += 1
        self._check_time(until, f"the round is not committed yet; newest version: {reply.version}")
        return None

    def _question(
        self, fragment: int, version: int, have_version: int | None, sequence: int | None, until: float
    ) -> Send:
        wait = max(0.0, min(self._poll_seconds, until - self._clock()))
        return Send(Await(self.worker_id, self.session, fragment, version, have_version, sequence, wait))

    def _ask(self, make: Callable[[], Send], until: float) -> Operation[Answer]:
        """Send until it is answered, registering again where the server does not know this worker."""
        attempt = 0
        while True:
            outcome = yield make()
            if isinstance(outcome, Answer) and not isinstance(outcome.reply, Refused):
                return outcome
            if isinstance(outcome, Answer) and isinstance(outcome.reply, Refused) and outcome.reply.status == 404:
                yield from self._join(until)
                self.num_rejoins += 1
            yield from self._pause(outcome, attempt, until)
            attempt += 1

    def _pause(self, outcome: Outcome, attempt: int, until: float) -> Operation[None]:
        """Wait before another attempt, if there is to be one."""
        reason = "no answer"
        if isinstance(outcome, Lost):
            reason = outcome.reason
        elif isinstance(outcome, Answer) and isinstance(outcome.reply, Refused):
            reason = outcome.reply.error
            if outcome.reply.status not in (404, 503):
                raise SessionEndedError(reason, outcome.reply.status)
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(attempt, 10)) * self._jitter(attempt)
        remaining = until - self._clock()
        if remaining <= 0:
            raise _OutOfTimeError(reason)
        yield Sleep(min(pause, remaining))

    def _jitter(self, attempt: int) -> float:
        """From 0.5 to 1, so that a thousand workers do not come at the same time; repeatable."""
        return 0.5 + zlib.crc32(f"{self.session}/{attempt}".encode()) / 2**33

    def _check_time(self, until: float, reason: str) -> None:
        if self._clock() >= until:
            raise _OutOfTimeError(reason)

    def _join(self, until: float) -> Operation[Registered]:
        attempt = offer = 0
        while True:
            outcome = yield Send(self._register(offer))
            if isinstance(outcome, Answer) and isinstance(outcome.reply, Registered):
                offer = outcome.reply.offer
                if not offer:
                    self._joined(outcome.reply)
                    return outcome.reply
                self._check_time(until, "another session of this worker's id is registered")
                continue
            yield from self._pause(outcome, attempt, until)
            attempt += 1

    def _register(self, offer: int) -> Register:
        return Register(
            self.worker_id,
            self.session,
            self._fingerprint,
            hostname=self._hostname,
            sync_every=self._sync_every,
            num_fragments=self._num_fragments,
            step=self.step,
            offer=offer,
            resumes_at=self._next_sequences.get(0, 0) if self._is_restored and self.registered is None else None,
        )

    def _joined(self, registered: Registered) -> None:
        is_first = self.registered is None
        if self._run_id not in (None, registered.run_id):
            raise SessionEndedError(
                f"the server has another run, {registered.run_id}, than this worker, {self._run_id}; "
                "restart the worker without its saved state, or the server from its own"
            )
        self._run_id, self.registered = registered.run_id, registered
        if not is_first:
            return
        if self._is_restored:
            self.superseded = frozenset(
                fragment
                for fragment, known in enumerate(registered.next_sequences)
                if known > self._next_sequences.get(fragment, 0)
            )
        for fragment, known in enumerate(registered.next_sequences):
            self._next_sequences[fragment] = max(known, self._next_sequences.get(fragment, 0))
