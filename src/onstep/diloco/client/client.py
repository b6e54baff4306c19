"""`DiLoCoClient`: one worker's requests to the server, or the servers, of a run."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from torch import Tensor

from onstep.diloco.client.connection import Body, Connection, RefusedByServerError, ServerLostError
from onstep.diloco.client.link import Link
from onstep.diloco.client.membership import Membership
from onstep.diloco.client.shares import Shares
from onstep.diloco.codec import read_body, specs_of
from onstep.diloco.protocol.messages import Beat, Deregister, Heartbeat, Refused, Reply, Request, fingerprint
from onstep.diloco.protocol.session import WorkerSession
from onstep.diloco.wire.http import CONTROL, GLOBAL_PARAMS, STATUS
from onstep.errors import ConfigError, require

logger: logging.Logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class DiLoCoClient:
    """Talks to the server of a run: a program's own loop can train with nothing else, if it is one process.

    A submission counts exactly once, whatever is lost on the way: the client asks what became of it, sends it again if
    the server died before it was committed, and registers again where it was evicted. One whose result is not known
    when `timeout` is over stays pending, and the same call with the same pseudo-gradients continues it.

    `DiLoCoWorker` does the same around any loop, with compression and streaming, and trains on while a submission is
    pending.

    Args:
        server_addr: `host:port`, or a URL with `http` or `https`; of several servers that share the parameters, all of
            them in the order of their shares, separated by commas.
        timeout: seconds without a byte after which a server counts as lost; for `submit_pseudogradients`, the seconds
            that a round may take.
        max_retries: further attempts of a request that got no answer.
        retry_delay: seconds before the first of them; doubles with each. Registrations and submissions are tried for
            as long as all these pauses take.
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
        self._membership: Membership | None = None
        self._link: Link | None = None

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

        A client is one worker: registering again, under this name or another, starts a new session, and gives up a
        submission that is pending, which may count or not.

        Args:
            worker_id: unique in the run.
            info: `hostname`, `sync_every`, `num_fragments` and `step`, all optional.
            parameters: the worker's own, whose names, shapes and dtypes the server compares with its model's; None
                trusts that they are the same.

        Raises:
            ServerLostError: if no answer comes.
            RefusedByServerError: if the server refuses, with the first parameter that differs.
        """
        specs = specs_of(self.get_global_params() if parameters is None else parameters)
        known = dict(info or {})
        step = known.pop("step", 0)
        session = WorkerSession(worker_id, secrets.token_hex(8), fingerprint(specs), clock=time.monotonic, **known)
        session.step = step
        self._link = Link(self, specs, self._retry_delay * (2**self._max_retries - 1))
        membership = Membership(self._link, session, specs, self.timeout)
        parameters = membership.join()
        self._membership = membership
        return parameters

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
            ServerLostError: if the result is not known within `timeout`, or no answer comes. The submission stays
                pending: the same call again continues it.
            ConfigError: if another submission is pending; call again with the pseudo-gradients of that one.
            SubmissionDroppedError: if some of it came too late to count; the error has the newest parameters.
            RefusedByServerError: if the server refuses.
        """
        member = self._member(worker_id)
        return member.submit(member.fragments, pseudogradients, tokens, steps)

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
        return self._member(worker_id).submit([fragment_id], pseudogradients, tokens, steps)

    def heartbeat(self, worker_id: str, steps_per_second: float = 0.0) -> dict[str, Any]:
        """Say that the worker is alive; returns `status`, `versions`, `num_registered`, `recommended_sync_every`.

        Raises:
            ServerLostError: if no answer comes.
            RefusedByServerError: with status 404 if the server has evicted the worker, which the next submission
                registers again.
        """
        reply = self._again(lambda: self._answer(Heartbeat(worker_id, self._session_id, steps_per_second)))
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
            self._answer(Deregister(worker_id, self._session_id))
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

    def control(self, action: str, body: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """Send an operator's command to all servers: `save_state`, `kick_worker`, `update_optimizer`,
        `update_num_workers` or `shutdown`; returns their answers. Raises as above.
        """
        return self._everyone("POST", f"{CONTROL}/{action}", dict(body or {}))

    def close(self) -> None:
        """Close the connections; what another thread waits for ends."""
        if self._link is not None:
            self._link.close()
        for connection in self._shares.connections:
            connection.close()

    def __enter__(self) -> DiLoCoClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _session_id(self) -> str:
        return "" if self._membership is None else self._membership.session.session

    def _member(self, worker_id: str) -> Membership:
        if self._membership is None or self._membership.session.worker_id != worker_id:
            raise ConfigError(f"worker_id must be the one that this client has registered, got {worker_id!r}.")
        return self._membership

    def _answer(self, request: Request) -> Reply:
        reply = self.send(request)[0]
        if isinstance(reply, Refused):
            raise RefusedByServerError(reply.status, f"the server: {reply.error}")
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
