"""`DiLoCoClient`: one worker's requests to the server, or the servers, of a run."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from torch import Tensor

from onstep.diloco.client.connection import Body, Connection, RefusedByServerError, ServerLostError
from onstep.diloco.client.shares import Shares
from onstep.diloco.codec import decode, encode, read_body, specs_of, write_body
from onstep.diloco.fragments import assign
from onstep.diloco.protocol.messages import (
    Accepted,
    Await,
    Beat,
    Deregister,
    Dropped,
    Heartbeat,
    NotYet,
    ParameterSpec,
    Ready,
    Refused,
    Register,
    Registered,
    Reply,
    Request,
    Submit,
    fingerprint,
)
from onstep.diloco.wire.http import CONTROL, GLOBAL_PARAMS, INFO, STATUS, WAIT_SECONDS, specs_to_bytes
from onstep.errors import ConfigError, require

logger: logging.Logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class DiLoCoClient:
    """Talks to the server of a run: a program's own loop can train with nothing else, if it is one process.

    `DiLoCoWorker` does the same around any loop, with compression, streaming and recovery.

    Args:
        server_addr: `host:port`, or a URL with `http` or `https`; of several servers that share the parameters, all of
            them in the order of their shares, separated by commas.
        timeout: seconds without a byte after which a server counts as lost; for `submit_pseudogradients`, the seconds
            that a round may take.
        max_retries: further attempts of a request that got no answer. Submissions count once, however often sent.
        retry_delay: seconds before the first of them; doubles with each.
        token: None for that of the environment (DILOCO_TOKEN, DILOCO_TOKEN_FILE), or of the token file of a server on
            this machine.
        verify: for `https`, the PEM file of the authority that vouches for the server.

    Raises:
        ConfigError: for an address that is none.
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
        addresses = [one.strip() for one in server_addr.split(",") if one.strip()]
        if not addresses:
            raise ConfigError("server_addr must be the host:port of a server, got an empty text.")
        self.timeout = timeout
        self._max_retries = max_retries
        self._retry_delay = retry_delay
        self._shares = Shares([Connection(one, timeout, token, verify) for one in addresses])
        self._session = secrets.token_hex(8)
        self._specs: tuple[ParameterSpec, ...] = ()
        self._assigned: tuple[tuple[str, ...], ...] = ()
        self._versions: dict[int, int] = {}
        self._sequences: dict[int, int] = {}

    def send(self, request: Request, body: Body = b"", timeout: float | None = None) -> tuple[Reply, memoryview]:
        """Send a request of the protocol, once; returns the reply, and its tensors as a safetensors file if it has any.

        Args:
            request: the message.
            body: the tensors of a submission; of a registration, `specs_to_bytes` of the parameters.
            timeout: in place of the client's.

        Raises:
            ServerLostError: if no answer comes.
        """
        return self._shares.send(request, body, timeout)

    def register(
        self, worker_id: str, info: Mapping[str, Any] | None = None, *, parameters: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Join the run; returns the newest parameters, in float32 or float64.

        Args:
            worker_id: unique in the run.
            info: `hostname`, `sync_every`, `num_fragments` and `step`, all optional.
            parameters: the worker's own, whose names, shapes and dtypes the server compares with its model's; None
                trusts that they are the same.

        Raises:
            ServerLostError: if no answer comes.
            RefusedByServerError: if the server refuses, with the first parameter that differs.
        """
        self._specs = specs_of(self.get_global_params() if parameters is None else parameters)
        self._session = secrets.token_hex(8)
        reply = self._join(Register(worker_id, self._session, fingerprint(self._specs), **dict(info or {})))
        self._assigned = assign(self._specs, reply.settings.num_fragments, reply.settings.num_shares)
        self._sequences = dict(enumerate(reply.next_sequences))
        versions = [self._fetch(worker_id, fragment, 0) for fragment in range(len(self._assigned))]
        return {name: tensor for version in versions for name, tensor in version.items()}

    def submit_pseudogradients(
        self, worker_id: str, pseudogradients: Mapping[str, Tensor], *, tokens: int = 1, steps: int = 1
    ) -> dict[str, Tensor]:
        """Submit `base - local` of all parameters, and wait for the round; returns the new parameters.

        Args:
            worker_id: as registered.
            pseudogradients: by name, sent in float32 or float64.
            tokens: their weight in the average, in the same unit for all workers.
            steps: optimizer steps behind them.

        Raises:
            ServerLostError: if no answer comes, or the round lasts longer than `timeout`.
            RefusedByServerError: if the server refuses.
        """
        submits = [
            self._submit(worker_id, fragment, {name: pseudogradients[name] for name in names}, tokens, steps)
            for fragment, names in enumerate(self._assigned)
        ]
        versions = [self._fetch(worker_id, fragment, version) for fragment, version in enumerate(submits)]
        return {name: tensor for version in versions for name, tensor in version.items()}

    def submit_fragment_pseudogradients(
        self,
        worker_id: str,
        fragment_id: int,
        pseudogradients: Mapping[str, Tensor],
        *,
        tokens: int = 1,
        steps: int = 1,
    ) -> dict[str, Tensor]:
        """The same for one fragment: returns its new parameters. Raises like `submit_pseudogradients`."""
        version = self._submit(worker_id, fragment_id, pseudogradients, tokens, steps)
        return self._fetch(worker_id, fragment_id, version)

    def heartbeat(self, worker_id: str, steps_per_second: float = 0.0) -> dict[str, Any]:
        """Say that the worker is alive; returns `status`, `versions`, `num_registered`, `recommended_sync_every`.

        Raises:
            ServerLostError: if no answer comes.
            RefusedByServerError: with status 404 if the server has evicted the worker: register again.
        """
        reply = self._again(lambda: self._answer(Heartbeat(worker_id, self._session, steps_per_second)))
        assert isinstance(reply, Beat)
        return {
            "status": "ok",
            "versions": list(reply.versions),
            "sync_round": sum(reply.versions),
            "num_registered": reply.num_registered,
            "recommended_sync_every": reply.recommended_sync_every,
        }

    def deregister(self, worker_id: str) -> None:
        """Leave the run. If no server answers, that is logged: the worker will be evicted."""
        try:
            self._answer(Deregister(worker_id, self._session))
        except ConnectionError as error:
            logger.warning("Worker %s could not deregister: %s", worker_id, error)

    def get_global_params(self) -> dict[str, Tensor]:
        """The newest parameters of all servers, without joining.

        Raises:
            ServerLostError: if no answer comes.
            RefusedByServerError: if a server refuses.
        """
        found: dict[str, Tensor] = {}
        for connection in self._shares.connections:
            received = self._again(partial(connection.request, "GET", GLOBAL_PARAMS))
            if received.status != 200:
                text = bytes(received.body[:200]).decode("utf-8", "replace")
                raise RefusedByServerError(received.status, f"{connection.url}: {text}")
            found |= read_body(received.body)
        return found

    def get_status(self) -> dict[str, Any]:
        """The status of the server; of several, that of the first, with the others as `shares`. Raises as above."""
        first, *others = self._everyone("GET", STATUS)
        return {**first, "shares": others} if others else first

    def get_info(self) -> list[dict[str, Any]]:
        """What each server says of itself: run, settings, share. Raises as above."""
        return self._everyone("GET", INFO)

    def control(self, action: str, body: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """Send an operator's command to all servers: `save_state`, `kick_worker`, `update_optimizer`,
        `update_num_workers` or `shutdown`; returns their answers. Raises as above.
        """
        return self._everyone("POST", f"{CONTROL}/{action}", dict(body or {}))

    def close(self) -> None:
        """Close the connections."""
        for connection in self._shares.connections:
            connection.close()

    def __enter__(self) -> DiLoCoClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _join(self, request: Register) -> Registered:
        body = specs_to_bytes(self._specs)
        reply = self._again(lambda: self._answer(request, body))
        assert isinstance(reply, Registered)
        if reply.offer:  # the id has another session, which this one replaces
            return self._join(replace(request, offer=reply.offer))
        return reply

    def _submit(
        self, worker_id: str, fragment: int, pseudogradients: Mapping[str, Tensor], tokens: int, steps: int
    ) -> int:
        """Submit for one fragment; returns the version to wait for."""
        names = self._assigned[fragment]
        sequence, base = self._sequences.get(fragment, 0), self._versions[fragment]
        request = Submit(worker_id, self._session, sequence, fragment, base, tokens, steps)
        body = write_body(encode({name: pseudogradients[name] for name in names}, "fp32"))
        reply = self._again(lambda: self._answer(request, body))
        assert isinstance(reply, Accepted | Dropped)
        self._sequences[fragment] = sequence + 1
        return reply.version

    def _fetch(self, worker_id: str, fragment: int, version: int) -> dict[str, Tensor]:
        """A version of a fragment, when it is there."""
        end = time.monotonic() + self.timeout
        while (left := end - time.monotonic()) > 0:
            question = Await(worker_id, self._session, fragment, version, wait=min(left, WAIT_SECONDS))
            reply, body = self._again(partial(self.send, question))
            if isinstance(reply, Ready):
                self._versions[fragment] = reply.version
                specs = [spec for spec in self._specs if spec.name in set(self._assigned[fragment])]
                return decode(read_body(body), specs, reply.codec)
            if not isinstance(reply, NotYet):
                _refuse(reply)
        raise ServerLostError(f"version {version} of fragment {fragment} was not there after {self.timeout:g} s.")

    def _answer(self, request: Request, body: Body = b"") -> Reply:
        reply = self.send(request, body)[0]
        if isinstance(reply, Refused):
            _refuse(reply)
        return reply

    def _again(self, attempt: Callable[[], Result]) -> Result:
        """Try until there is an answer."""
        for number in range(self._max_retries):
            try:
                return attempt()
            except ServerLostError as error:
                delay = self._retry_delay * 2**number
                logger.warning("%s Trying again in %g s.", error, delay)
                time.sleep(delay)
        return attempt()

    def _everyone(self, method: str, path: str, body: Any = None) -> list[dict[str, Any]]:
        connections: Sequence[Connection] = self._shares.connections
        return [self._again(partial(one.json, method, path, body)) for one in connections]


def _refuse(reply: Reply) -> None:
    if isinstance(reply, Refused):
        raise RefusedByServerError(reply.status, reply.error)
    raise ServerLostError(f"the server answered {type(reply).__name__}, which does not fit the request.")
