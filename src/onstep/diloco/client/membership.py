"""Makes a program a member of a run: joins, submits fragments, and fetches their versions over a client."""

from __future__ import annotations

import os
import platform
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from torch import Tensor

from onstep.control.job_info import is_endpoint_pid_alive
from onstep.diloco.client.outage import Outage
from onstep.diloco.codec.body import read_body
from onstep.diloco.codec.formats import check_encoded, check_values, decode_one
from onstep.diloco.codec.specs import InvalidTensorsError, digest
from onstep.diloco.fragments import assign
from onstep.diloco.protocol.messages import (
    Beat,
    Dropped,
    ParameterSpec,
    Register,
    Registered,
    Reply,
    Request,
    fingerprint,
)
from onstep.diloco.protocol.operations import (
    Answer,
    Delivery,
    Lost,
    Operation,
    Outcome,
    Send,
    ServerLostError,
)
from onstep.diloco.protocol.session import WorkerSession
from onstep.diloco.wire.http import specs_to_bytes
from onstep.errors import OnstepError

Tensors = dict[str, Tensor]
T = TypeVar("T")
ATTEMPTS = 3
"""At fetching a version whose hash is that of the server."""


class Client(Protocol):
    """The requests that a membership sends."""

    def send(self, request: Request, body: bytes | bytearray = b"") -> tuple[Reply, Any]:
        """The reply and its body; raises ServerLostError without an answer."""

    def close(self) -> None:
        """Close the connections."""


class MembershipClosedError(OnstepError):
    """The worker stopped while an operation was running."""


@dataclass(frozen=True)
class Version:
    """A version of a fragment."""

    number: int
    parameters: Mapping[str, Tensor]
    """In float32 or float64, equal on all workers."""
    num_contributors: int = 0
    is_update: bool = False
    """Whether `parameters` are to be added to those of the version before; never so after `read_version`."""
    digest: str = ""
    """With which the hash of the sums has to be compared still."""


class Encoded(Mapping[str, Tensor]):
    """The tensors of a body, each of which is decoded when it is read.

    Raises:
        InvalidTensorsError: for a body without exactly these parameters.
    """

    def __init__(self, body: bytes | bytearray | memoryview, specs: Sequence[ParameterSpec], codec: str) -> None:
        self._tensors, self._codec = read_body(body), codec
        self._specs = {spec.name: spec for spec in specs}
        check_encoded(self._tensors, specs, codec)
        check_values(self._tensors, specs, codec)

    def __getitem__(self, name: str) -> Tensor:
        return decode_one(self._tensors, self._specs[name], self._codec)

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)


@dataclass
class Transfers:
    """Bytes so far."""

    sent_bytes: int = 0
    received_bytes: int = 0
    last_received_bytes: int = 0
    """Of the last version."""


class Membership:
    """One session of a worker; `join` comes first. Several threads may use it, each for other fragments.

    Every method raises ServerLostError if there is no result within its bound, RefusedByServerError if the server
    refuses this worker, and MembershipClosedError after `close`.

    Args:
        client: sends one request and returns its reply.
        worker_id: unique in the run.
        specs: all trained parameters.
        timeout: seconds that a round may last.
        lost_seconds: after this long without any answer, an operation fails even before its bound.
        decodes: whether versions are decoded and compared with their hash as they arrive; else by who reads them.
        info: `hostname`, `sync_every`, `num_fragments` and `details`, all optional.
    """

    def __init__(
        self,
        client: Client,
        worker_id: str,
        specs: Sequence[ParameterSpec],
        *,
        timeout: float,
        lost_seconds: float,
        decodes: bool = True,
        **info: Any,
    ) -> None:
        info["details"] = {**this_process(), **(info.get("details") or {})}
        self.session = WorkerSession(
            worker_id,
            secrets.token_hex(8),
            fingerprint(specs),
            clock=time.monotonic,
            lost_seconds=lost_seconds,
            lives=lives_here,
            **info,
        )
        self.fragments: tuple[tuple[ParameterSpec, ...], ...] = ()
        """The parameters of each, once joined."""
        self.dropped: dict[int, Dropped] = {}
        """Fragments whose last submission did not count, with the server's answer, until the owner removes them."""
        self.transfers = Transfers()
        self.outage = Outage()
        self.specs = specs
        self._read = read_version if decodes else undecoded_version
        self._client, self._timeout = client, timeout
        self._decided: set[int] = set()
        """Fragments whose last submission was committed or dropped, but whose newest version has not arrived."""
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def join(self) -> Registered:
        """Register, and divide the parameters into the server's fragments."""
        try:
            registered = self._run(self.session.join(self._timeout))
        except ServerLostError as error:
            raise ServerLostError(f"no answer from the server: {str(error).rstrip('.')}; is it running?") from error
        settings = registered.settings
        self.fragments = assign(self.specs, settings.num_fragments)
        return registered

    def fetch(self, fragment: int, bound: float | None = None) -> Version:
        """The newest version of a fragment.

        Raises:
            InvalidTensorsError: if its hash differs from the server's in every attempt.
        """
        for _ in range(ATTEMPTS):
            delivery = self._run(self.session.fetch(fragment, self._timeout if bound is None else bound))
            version = self._read(delivery, self.fragments[fragment])
            if version is not None:
                return version
        raise always_damaged(delivery.ready.version, fragment)

    def result(self, fragment: int, bound: float | None = None, base: Version | None = None) -> Version:
        """Send the fragment's submission unless the server has it, and wait until it is committed or dropped.

        After a ServerLostError, calling this again continues. A submission that did not count is in `dropped`.

        Args:
            fragment: a fragment with a submission from `session.begin`.
            bound: seconds; None for `timeout`.
            base: the version that the worker has, so that only the update has to be sent.

        Returns:
            The newest version of the fragment.
        """
        bound, started = self._timeout if bound is None else bound, time.monotonic()
        if fragment not in self._decided:
            found = self._run(self.session.result(fragment, bound, None if base is None else base.number))
            if isinstance(found, Dropped):
                self.dropped[fragment] = found
            else:
                self.session.note_round(time.monotonic() - started)
                version = self._read(found, self.fragments[fragment], base)
                if version is not None:
                    return version
            self._decided.add(fragment)
        version = self.fetch(fragment, bound)
        self._decided.discard(fragment)
        return version

    def beat(self, steps_per_second: float, bound: float) -> Beat:
        """Send a heartbeat; returns the server's `Beat`."""
        return self._run(self.session.beat(steps_per_second, bound))

    def leave(self, reason: str = "") -> None:
        """Deregister, with the reason for the server's log, in one attempt."""
        self._run(self.session.leave(reason))

    def close(self) -> None:
        """End all operations as soon as their request returns, and close the client."""
        self._closed.set()
        self._client.close()

    def _run(self, operation: Operation[T]) -> T:
        """Perform the effects of an operation; its threads change the session in turn."""
        outcome: Outcome = None
        while not self._closed.is_set():
            try:
                with self._lock:
                    effect = operation.send(outcome)
            except StopIteration as done:
                result: T = done.value
                return result
            if isinstance(effect, Send):
                outcome = self._send(effect)
            else:
                self._closed.wait(effect.seconds)
        operation.close()
        raise MembershipClosedError("the worker was stopped")

    def _send(self, effect: Send) -> Answer | Lost:
        request = effect.request
        body = specs_to_bytes(self.specs) if isinstance(request, Register) else effect.body or b""
        assert isinstance(body, bytes | bytearray)
        try:
            reply, received = self._client.send(request, body)
        except ServerLostError as error:
            return Lost(str(error))
        with self._lock:
            self.transfers.sent_bytes += len(body)
            if received:
                self.transfers.received_bytes += len(received)
                self.transfers.last_received_bytes = len(received)
        return Answer(reply, received)


def this_process() -> dict[str, object]:
    """By what another process knows whether this one lives."""
    return {"pid": os.getpid(), "started_at": time.time(), "machine": platform.node()}


def lives_here(incumbent: Mapping[str, object]) -> bool | None:
    """Whether a process of this machine lives that has a worker's id; None for one of another machine.

    A session of this very process is replaced by its next one.
    """
    pid, started_at = incumbent.get("pid"), incumbent.get("started_at")
    if not isinstance(pid, int) or not isinstance(started_at, int | float):
        return False
    if incumbent.get("machine") != platform.node():
        return None
    return pid != os.getpid() and is_endpoint_pid_alive(pid, float(started_at))


def undecoded_version(
    delivery: Delivery, specs: Sequence[ParameterSpec], base: Version | None = None
) -> Version | None:
    """The version that arrived, as it did; None if `base` is not what its update is relative to.

    Raises:
        InvalidTensorsError: for a body without exactly these parameters.
    """
    ready, body = delivery.ready, delivery.body
    assert isinstance(body, bytes | bytearray | memoryview)
    tensors, is_update = Encoded(body, specs, ready.codec), ready.kind == "update"
    if is_update and (base is None or ready.version != base.number + 1):
        return None
    return Version(ready.version, tensors, ready.num_contributors, is_update, ready.digest)


def read_version(delivery: Delivery, specs: Sequence[ParameterSpec], base: Version | None = None) -> Version | None:
    """The version that arrived; None if its hash is not the server's, or `base` is not what its update is relative to.

    Raises:
        InvalidTensorsError: for a body without exactly these parameters.
    """
    found = undecoded_version(delivery, specs, base)
    if found is None:
        return None
    tensors = dict(found.parameters)
    if found.is_update:
        assert base is not None
        tensors = {name: base.parameters[name] + update for name, update in tensors.items()}
    is_intact = found.digest in ("", digest(tensors))
    return Version(found.number, tensors, found.num_contributors) if is_intact else None


def always_damaged(version: int, fragment: int) -> InvalidTensorsError:
    """The error about a version that never arrives as the server has it."""
    return InvalidTensorsError(
        f"version {version} of fragment {fragment} arrived {ATTEMPTS} times with another hash than the server's; check "
        f"the network and the memory of both machines."
    )
