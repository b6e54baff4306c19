"""A worker's membership in a run as a client has it: its submissions, and what became of them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from onstep.diloco.client.connection import RefusedByServerError, ServerLostError
from onstep.diloco.client.link import Link
from onstep.diloco.client.versions import Tensors, fetch_version, received
from onstep.diloco.codec import encode, write_body
from onstep.diloco.fragments import assign
from onstep.diloco.protocol.messages import ParameterSpec
from onstep.diloco.protocol.session import Counted, NotCounted, SessionEndedError, Unsettled, WorkerSession
from onstep.errors import ConfigError, OnstepError

_NEVER_COUNT = frozenset({400, 413, 422})
"""Statuses of a submission that the server has looked at and refused."""


class SubmissionDroppedError(OnstepError):
    """A submission did not count, and no version will have it: it came too late.

    `parameters` are the newest of all that was submitted, by name, and `dropped` the names of those whose difference
    did not count. Continue from the parameters, with your own progress added to them or without it.
    """

    def __init__(self, reason: str, parameters: Tensors, dropped: Sequence[str]) -> None:
        super().__init__(f"the submission was dropped: {reason}; continue from the error's `parameters`.")
        self.parameters, self.dropped = parameters, tuple(dropped)


@dataclass
class _Submission:
    """What was submitted of a fragment, until the caller has the result."""

    body: bytes
    tokens: int
    steps: int
    settled: Counted | NotCounted | None = None
    """What became of it; None: not known."""
    result: Tensors | None = None
    """The newest parameters, once it is settled and they are there."""

    def is_same(self, other: _Submission) -> bool:
        return (self.tokens, self.steps, self.body) == (other.tokens, other.steps, other.body)


class Membership:
    """One session of a worker; `join` comes first.

    Args:
        link: performs the requests.
        session: the worker's side of the protocol.
        specs: of all parameters.
        timeout: seconds that a round may take.
    """

    def __init__(self, link: Link, session: WorkerSession, specs: Sequence[ParameterSpec], timeout: float) -> None:
        self.session = session
        self._link, self._specs, self._timeout = link, specs, timeout
        self._parts: Sequence[Sequence[ParameterSpec]] = ()
        self._versions: dict[int, int] = {}
        self._submissions: dict[int, _Submission] = {}

    @property
    def fragments(self) -> range:
        """All of the run's."""
        return range(len(self._parts))

    def join(self) -> Tensors:
        """Register; returns the newest parameters.

        Raises:
            ServerLostError: without an answer.
            RefusedByServerError: if the server refuses this worker.
        """
        try:
            registered = self._link.run(self.session.join(self._timeout))
            if isinstance(registered, Unsettled):
                raise ServerLostError(f"no answer to the registration: {registered.reason}")
            settings = registered.settings
            self._parts = assign(self._specs, settings.num_fragments, settings.num_shares)
            return _merged([self._fetch(fragment, self._timeout) for fragment in self.fragments])
        except SessionEndedError as error:
            raise _refusal(error) from error

    def submit(self, fragments: Sequence[int], differences: Mapping[str, Tensor], tokens: int, steps: int) -> Tensors:
        """Submit fragments, or continue what was not settled before; returns their newest parameters.

        Raises:
            ServerLostError: if the result is not known in time; the submission stays.
            SubmissionDroppedError: if some of it does not count.
            ConfigError: if a submission with another difference is not settled.
            RefusedByServerError: if the server refuses.
        """
        new = {fragment: self._encoded(fragment, differences, tokens, steps) for fragment in fragments}
        for fragment, one in new.items():
            before = self._submissions.get(fragment)
            if before is not None and not before.is_same(one):
                raise ConfigError(
                    f"the submission of fragment {fragment} before this one must be settled first: call again with "
                    "exactly its pseudo-gradients, tokens and steps, or register again, which gives it up"
                )
        for fragment, one in new.items():
            if fragment not in self._submissions:
                self._begin(fragment, one)
        self._settle(fragments)
        return _result([self._submissions.pop(fragment) for fragment in fragments])

    def _encoded(self, fragment: int, differences: Mapping[str, Tensor], tokens: int, steps: int) -> _Submission:
        names = [spec.name for spec in self._parts[fragment]]
        missing = [name for name in names if name not in differences]
        if missing:
            raise ConfigError(
                f"pseudogradients must have all {len(names)} parameters; {missing[0]} is missing; add it."
            )
        body = write_body(encode({name: differences[name] for name in names}, "fp32"))
        return _Submission(body, tokens, steps)

    def _begin(self, fragment: int, one: _Submission) -> None:
        base = self._versions[fragment]
        self.session.begin(fragment, base_version=base, tokens=one.tokens, steps=one.steps, body=one.body)
        self._submissions[fragment] = one

    def _settle(self, fragments: Sequence[int]) -> None:
        """Find out what became of submissions; all are sent before any is waited for."""
        until = time.monotonic() + self._timeout
        try:
            if len(fragments) > 1:
                for fragment in fragments:
                    self._try_to_settle(fragment, 0.0)
            for fragment in fragments:
                reason = self._try_to_settle(fragment, max(0.0, until - time.monotonic()))
                if reason:
                    raise ServerLostError(
                        f"no result within {self._timeout:g} s: {reason}. The submission of fragment {fragment} stays "
                        "pending, and the same call again continues it."
                    )
        except SessionEndedError as error:
            if error.status in _NEVER_COUNT:
                self.session.withdraw(fragment)
                del self._submissions[fragment]
            raise _refusal(error) from error

    def _try_to_settle(self, fragment: int, bound: float) -> str:
        """Why there is no result yet; empty if there is one."""
        one = self._submissions[fragment]
        try:
            if one.settled is None:
                settled = self._link.run(self.session.settle(fragment, bound))
                if isinstance(settled, Unsettled):
                    return settled.reason
                one.settled = settled
                if isinstance(settled, Counted):
                    one.result = received(settled.ready, settled.body, self._parts[fragment])
                    self._versions[fragment] = settled.ready.version
            if one.result is None:
                one.result = self._fetch(fragment, bound)
        except ServerLostError as error:
            return str(error)
        return ""

    def _fetch(self, fragment: int, bound: float) -> Tensors:
        """The newest parameters of a fragment."""
        found = fetch_version(self._link, self.session, fragment, self._parts[fragment], bound)
        if isinstance(found, Unsettled):
            raise ServerLostError(found.reason)
        ready, tensors = found
        self._versions[fragment] = ready.version
        return tensors


def _result(submissions: Sequence[_Submission]) -> Tensors:
    parameters = _merged([one.result or {} for one in submissions])
    dropped = [one for one in submissions if isinstance(one.settled, NotCounted)]
    if dropped:
        assert isinstance(dropped[0].settled, NotCounted)
        names = [name for one in dropped for name in one.result or {}]
        raise SubmissionDroppedError(dropped[0].settled.reason, parameters, names)
    return parameters


def _merged(parts: Sequence[Tensors]) -> Tensors:
    return {name: tensor for part in parts for name, tensor in part.items()}


def _refusal(error: SessionEndedError) -> RefusedByServerError:
    return RefusedByServerError(error.status, f"the server: {error}")
