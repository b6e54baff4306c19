"""A worker that sends what a test tells it to, once, over real sockets."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from torch import Tensor

from onstep.diloco.client import DiLoCoClient
from onstep.diloco.codec.body import read_body, write_body
from onstep.diloco.codec.formats import encode
from onstep.diloco.codec.specs import specs_of
from onstep.diloco.protocol.messages import (
    Await,
    Heartbeat,
    Ready,
    Register,
    Registered,
    Reply,
    Submit,
    fingerprint,
)
from onstep.diloco.wire.http import specs_to_bytes


class RawWorker:
    """One worker of a run."""

    def __init__(self, client: DiLoCoClient, worker_id: str, parameters: Mapping[str, Tensor]) -> None:
        self.client = client
        self.worker_id = worker_id
        self.specs = specs_of(parameters)
        self.session = secrets.token_hex(4)

    def register(self) -> Reply:
        """Ask to join."""
        request = Register(self.worker_id, self.session, fingerprint(self.specs))
        return self.client.send(request, specs_to_bytes(self.specs))[0]

    def join(self) -> Registered:
        """Join."""
        reply = self.register()
        assert isinstance(reply, Registered), reply
        if reply.offer:
            request = Register(self.worker_id, self.session, fingerprint(self.specs), offer=reply.offer)
            reply = self.client.send(request)[0]
            assert isinstance(reply, Registered), reply
        return reply

    def request(self, sequence: int = 0, base: int = 0, *, fragment: int = 0, tokens: int = 1) -> Submit:
        """A submission's message."""
        return Submit(self.worker_id, self.session, sequence, fragment, base, tokens, 1)

    def submit(
        self,
        tensors: Mapping[str, Tensor],
        sequence: int = 0,
        base: int = 0,
        *,
        fragment: int = 0,
        tokens: int = 1,
        codec: str = "fp32",
    ) -> Reply:
        """Submit a pseudo-gradient."""
        request = Submit(self.worker_id, self.session, sequence, fragment, base, tokens, 1, codec)
        return self.client.send(request, write_body(encode(tensors, codec)))[0]

    def ask(
        self, version: int, *, fragment: int = 0, have: int | None = None, wait: float = 0.0
    ) -> tuple[Reply, bytes]:
        """Ask for a version."""
        reply, body = self.client.send(Await(self.worker_id, self.session, fragment, version, have, wait=wait))
        return reply, bytes(body)

    def get(self, version: int, *, fragment: int = 0, have: int | None = None) -> tuple[Ready, dict[str, Tensor]]:
        """Wait for a version; its tensors as sent."""
        reply, body = self.ask(version, fragment=fragment, have=have, wait=20.0)
        assert isinstance(reply, Ready), reply
        return reply, read_body(body)

    def beat(self) -> Reply:
        """Give a sign of life."""
        return self.client.send(Heartbeat(self.worker_id, self.session))[0]
