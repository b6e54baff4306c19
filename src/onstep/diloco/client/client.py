"""`DiLoCoClient`: the requests of one worker to the server of a run."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from torch import Tensor

from onstep.diloco.client.connection import Body, Connection
from onstep.diloco.client.membership import Membership, Tensors, Version
from onstep.diloco.codec.body import read_body, write_body
from onstep.diloco.codec.formats import encode
from onstep.diloco.codec.specs import specs_of
from onstep.diloco.protocol.messages import Beat, Deregister, Heartbeat, Refused, Reply, Request
from onstep.diloco.protocol.operations import RefusedByServerError, ServerLostError
from onstep.diloco.protocol.settings import warn_of_disagreements
from onstep.diloco.wire.http import CONTROL, GLOBAL_PARAMS, STATUS
from onstep.errors import ConfigError, OnstepError, require

logger: logging.Logger = logging.getLogger(__name__)

Result = TypeVar("Result")
_NEVER_COUNT = frozenset({400, 413, 422})
"""Statuses of a submission that the server has read and refused."""


class SubmissionDroppedError(OnstepError):
    """A submission came too late: no version will contain it.

    `parameters` are the newest of all that was submitted, by name; `dropped` names those whose pseudo-gradient did not
    count. Continue from the parameters, with or without your own progress added to them.
    """

    def __init__(self, reason: str, parameters: Tensors, dropped: Sequence[str]) -> None:
        super().__init__(f"the submission was dropped: {reason}; continue from the error's `parameters`.")
        self.parameters, self.dropped = parameters, tuple(dropped)


@dataclass
class _Submission:
    """A submission of a fragment whose result the caller does not have yet."""

    body: bytes
    tokens: int
    steps: int


class DiLoCoClient:
    """The requests of one worker: enough for the training loop of a program with a single process.

    A submission counts exactly once, whatever is lost on the way: it is sent again if its answer was lost or the server
    died before the commit, and the client registers again if the server has evicted it. If the result is not known when
    `timeout` is over, the submission stays pending, and the same call with the same pseudo-gradients continues it.

    `DiLoCoWorker` does the same around any loop, with compression and streaming, and keeps training while a submission
    is pending.

    Args:
        server_addr: `host:port`, or a URL with `http` or `https`.
        timeout: seconds without a byte after which a server counts as lost; for `submit_pseudogradients`, the seconds
            that a round may last.
        max_retries: further attempts of a request without an answer.
        retry_delay: seconds before the first of them; doubles with each. Registrations and submissions are retried for
            as long as all these pauses last.
        token: None for the one in the environment (DILOCO_TOKEN, DILOCO_TOKEN_FILE), or in the token file of a server
            on this machine.
        verify: for `https`, the PEM file of the certification authority.

    Raises:
        ConfigError: for an invalid address.
    """

    def __init__(
        self,
        server_addr: str,
        timeout: float = 600.0,
        max_retries: int = 3,
        retry_delay: float = 1.0,
        *,
        token: str | None = None,
        verify: str | Path | None = None,
    ) -> None:
        require(timeout > 0, "timeout", "> 0", timeout)
        require(max_retries >= 0, "max_retries", ">= 0", max_retries)
        self.timeout = timeout
        self._max_retries, self._retry_delay = max_retries, retry_delay
        self._connection = Connection(server_addr, timeout, token, verify)
        self._membership: Membership | None = None
        self._versions: dict[int, int] = {}
        """The newest that the caller has, by fragment."""
        self._submissions: dict[int, _Submission] = {}
        self._results: dict[int, Version] = {}
        """Of submissions whose call has not returned yet, because other fragments of it are pending."""

    def send(self, request: Request, body: Body = b"") -> tuple[Reply, memoryview]:
        """Send a request of the protocol, once; returns the reply, and its tensors as a safetensors file if it has any.

        Args:
            request: the message.
            body: the tensors of a submission; for a registration, `specs_to_bytes` of the parameters.

        Raises:
            ServerLostError: if no answer comes.
        """
        return self._connection.send(request, body)

    def register(
        self, worker_id: str, info: Mapping[str, Any] | None = None, *, parameters: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Join the run; returns the newest parameters, in float32 or float64.

        A client is one worker: registering again, under this name or another, starts a new session and abandons a
        pending submission, which may still count.

        Args:
            worker_id: unique in the run.
            info: `hostname`, `sync_every`, `num_fragments` and `step`, all optional; what else it has, such as
                `num_gpus` and `gpu_names`, is shown in the status.
            parameters: the worker's own, whose names, shapes and dtypes the server compares with its model's; None
                assumes that they are the same.

        Raises:
            ServerLostError: if no answer comes.
            RefusedByServerError: if the server refuses; names the first parameter that differs.
        """
        specs = specs_of(self.get_global_params() if parameters is None else parameters)
        details = dict(info or {})
        names = ("hostname", "sync_every", "num_fragments")
        known: dict[str, Any] = {name: details.pop(name) for name in names if name in details}
        step, lost_seconds = details.pop("step", 0), self._retry_delay * (2**self._max_retries - 1)
        if details.pop("worker_id", worker_id) != worker_id:
            raise ConfigError(f"info names another worker_id than {worker_id!r}; leave it out.")
        options: dict[str, Any] = {"timeout": self.timeout, "lost_seconds": lost_seconds, "details": details, **known}
        member = Membership(self._connection, worker_id, specs, **options)
        member.session.step = step
        settings = member.join().settings
        codec = None if details.get("bf16_comm") is None else ("bf16" if details["bf16_comm"] else "fp32")
        warn_of_disagreements(worker_id, settings, known.get("sync_every"), codec, details.get("dylu"))
        newest = [member.fetch(fragment) for fragment in range(len(member.fragments))]
        self._membership, self._submissions, self._results = member, {}, {}
        self._versions = {fragment: version.number for fragment, version in enumerate(newest)}
        return _merged(newest)

    def submit_pseudogradients(
        self, worker_id: str, pseudogradients: Mapping[str, Tensor], *, tokens: int = 1, steps: int = 1
    ) -> dict[str, Tensor]:
        """Submit `base - local` of all parameters, and wait for the round; returns the new parameters.

        Args:
            worker_id: as registered.
            pseudogradients: by name, sent in float32 or float64.
            tokens: their weight in the average, in the same unit for all workers.
            steps: optimizer steps that led to them.

        Raises:
            ServerLostError: if the result is not known within `timeout`, or no answer comes. The submission stays
                pending: the same call again continues it.
            ConfigError: if another submission is pending; call again with the pseudo-gradients of that one.
            SubmissionDroppedError: if some of it came too late to count; the error has the newest parameters.
            RefusedByServerError: if the server refuses.
        """
        member = self._member(worker_id)
        return self._submit(member, range(len(member.fragments)), pseudogradients, tokens, steps)

    def submit_fragment_pseudogradients(
        self,
        worker_id: str,
        fragment_id: int,
        pseudogradients: Mapping[str, Tensor],
        *,
        tokens: int = 1,
        steps: int = 1,
    ) -> dict[str, Tensor]:
        """The same for one fragment: returns its new parameters. Raises like `submit_pseudogradients`.

        Args:
            worker_id: the name of the worker in the run.
            fragment_id: the number of the fragment, from 0.
            pseudogradients: the weights at the start of the round minus those at its end, by name.
            tokens: tokens trained on since the last submission.
            steps: steps trained since the last submission.
        """
        return self._submit(self._member(worker_id), [fragment_id], pseudogradients, tokens, steps)

    def heartbeat(self, worker_id: str, steps_per_second: float = 0.0) -> dict[str, Any]:
        """Send a heartbeat; returns `status`, `versions`, `num_registered`, `recommended_sync_every`, and `commands`,
        those for all workers that this one has not had.

        Args:
            worker_id: the name of the worker in the run.
            steps_per_second: the current speed of the worker.

        Raises:
            ServerLostError: if no answer comes.
            RefusedByServerError: with status 404 if the server has evicted the worker; its next submission registers it
                again.
        """
        session = None if self._membership is None else self._membership.session
        number = 0 if session is None else session.command_number
        beat = Heartbeat(worker_id, self._session_id, steps_per_second, command_number=number)
        reply = self._retried(lambda: self._answer(beat))
        assert isinstance(reply, Beat)
        if session is not None:
            session.note_commands(reply)
        return {
            "status": "ok",
            "versions": list(reply.versions),
            "sync_round": sum(reply.versions),
            "num_registered": reply.num_registered,
            "recommended_sync_every": reply.recommended_sync_every,
            "commands": [] if session is None else session.take_commands(),
        }

    def deregister(self, worker_id: str) -> None:
        """Leave the run. A missing answer is only logged: the server will evict the worker.

        Args:
            worker_id: the name of the worker in the run.
        """
        try:
            self._answer(Deregister(worker_id, self._session_id))
        except ConnectionError as error:
            logger.warning("Worker %s could not deregister: %s", worker_id, error)

    def get_global_params(self) -> dict[str, Tensor]:
        """The newest parameters, without joining.

        Raises:
            ServerLostError: if no answer comes.
            RefusedByServerError: if the server refuses.
        """
        return read_body(self._retried(partial(self._connection.tensors, GLOBAL_PARAMS)))

    def get_status(self) -> dict[str, Any]:
        """The status of the server. Raises as above."""
        return self._retried(partial(self._connection.json, "GET", STATUS))

    def control(self, action: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send an operator's command: `save_state`, `kick_worker`, `update_optimizer`, `update_num_workers`,
        `command` (what all workers do: `save`, `stop`, `save-stop` or `abort`), `go_back` or `shutdown`; returns the
        answer. Raises as above.

        Args:
            action: the name of the command.
            body: its fields by name.
        """
        return self._retried(partial(self._connection.json, "POST", f"{CONTROL}/{action}", dict(body or {})))

    def close(self) -> None:
        """Close the connections; operations in other threads end."""
        if self._membership is not None:
            self._membership.close()
        self._connection.close()

    def __enter__(self) -> DiLoCoClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _session_id(self) -> str:
        return "" if self._membership is None else self._membership.session.id

    def _member(self, worker_id: str) -> Membership:
        if self._membership is None or self._membership.session.worker_id != worker_id:
            raise ConfigError(f"worker_id must be the one that this client has registered, got {worker_id!r}.")
        return self._membership

    def _submit(
        self, member: Membership, fragments: Sequence[int], differences: Mapping[str, Tensor], tokens: int, steps: int
    ) -> Tensors:
        """Submit fragments, or continue a call that timed out; returns their newest parameters."""
        new = {one: _Submission(_encoded(member, one, differences), tokens, steps) for one in fragments}
        for fragment, submission in new.items():
            if self._submissions.get(fragment, submission) != submission:
                raise ConfigError(
                    f"the previous submission of fragment {fragment} is pending: call again with exactly its "
                    "pseudo-gradients, tokens and steps, or register again, which abandons it"
                )
        for fragment, submission in new.items():
            if fragment not in self._submissions:
                base, body = self._versions[fragment], submission.body
                member.session.begin(fragment, base_version=base, tokens=tokens, steps=steps, body=body)
                self._submissions[fragment] = submission
        self._wait(member, fragments)
        results = [self._results.pop(fragment) for fragment in fragments]
        for fragment in fragments:
            del self._submissions[fragment]
        self._versions |= {fragment: result.number for fragment, result in zip(fragments, results, strict=True)}
        dropped = {fragment: member.dropped.pop(fragment) for fragment in fragments if fragment in member.dropped}
        if dropped:
            names = [spec.name for fragment in dropped for spec in member.fragments[fragment]]
            raise SubmissionDroppedError(next(iter(dropped.values())).reason, _merged(results), names)
        return _merged(results)

    def _wait(self, member: Membership, fragments: Sequence[int]) -> None:
        """Get the results of submissions; all are sent before the first is waited for."""
        until = time.monotonic() + self.timeout
        for is_last in (False, True) if len(fragments) > 1 else (True,):
            for fragment in [one for one in fragments if one not in self._results]:
                bound = max(0.0, until - time.monotonic()) if is_last else 0.0
                with nullcontext() if is_last else suppress(ServerLostError):
                    self._results[fragment] = self._result(member, fragment, bound)

    def _result(self, member: Membership, fragment: int, bound: float) -> Version:
        try:
            return member.result(fragment, bound)
        except ServerLostError as error:
            raise ServerLostError(
                f"no result within {self.timeout:g} s: {str(error).rstrip('.')}. The submission of fragment {fragment} "
                "stays pending, and the same call again continues it."
            ) from error
        except RefusedByServerError as error:
            if error.status in _NEVER_COUNT:
                member.session.withdraw(fragment)
                del self._submissions[fragment]
            raise

    def _answer(self, request: Request) -> Reply:
        reply = self.send(request)[0]
        if isinstance(reply, Refused):
            raise RefusedByServerError(reply.status, reply.error)
        return reply

    def _retried(self, attempt: Callable[[], Result]) -> Result:
        """Try until there is an answer."""
        for number in range(self._max_retries):
            try:
                return attempt()
            except ServerLostError as error:
                delay = self._retry_delay * 2**number
                logger.warning("%s Trying again in %g s.", error, delay)
                time.sleep(delay)
        return attempt()


def _encoded(member: Membership, fragment: int, differences: Mapping[str, Tensor]) -> bytes:
    names = [spec.name for spec in member.fragments[fragment]]
    missing = [name for name in names if name not in differences]
    if missing:
        raise ConfigError(f"pseudogradients must have all {len(names)} parameters; {missing[0]} is missing; add it.")
    return write_body(encode({name: differences[name] for name in names}, "fp32"))


def _merged(versions: Sequence[Version]) -> Tensors:
    return {name: tensor for version in versions for name, tensor in version.parameters.items()}
