"""A server without sockets: the real coordinator and masters behind a client's `send`, with faults on demand."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from onstep.diloco.client import ServerLostError
from onstep.diloco.codec.body import read_body, write_body
from onstep.diloco.codec.formats import encode
from onstep.diloco.codec.specs import specs_of
from onstep.diloco.fragments import assign
from onstep.diloco.protocol.coordinator import Coordinator
from onstep.diloco.protocol.messages import Await, NotYet, Ready, Reply, Request, Settings, Submit, fingerprint
from onstep.diloco.server.averaging import Contribution
from onstep.diloco.server.masters import Fragment


def sgd(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


def key(submit: Submit) -> tuple[str, int, int]:
    return submit.worker_id, submit.fragment, submit.sequence


class LocalServer:
    """`send` may be called by several workers' threads."""

    def __init__(self, parameters: Mapping[str, Tensor], settings: Settings, outer: Any = sgd) -> None:
        specs = specs_of(parameters)
        parts = assign(specs, settings.num_fragments)
        self.fragments = [Fragment(part, parameters, outer, settings.codec) for part in parts]
        self.coordinator = Coordinator(settings, run_id="run", fingerprint=fingerprint(specs))
        self.digests: dict[tuple[int, int], str] = {}
        self.submits: list[Submit] = []
        self.is_down = False
        self.lose_answers_of: set[type] = set()
        """Requests that are carried out, and whose next answer is lost."""
        self._bodies: dict[tuple[str, int, int], bytes] = {}
        self._changed = threading.Condition()

    def parameters(self) -> dict[str, Tensor]:
        return {name: value for one in self.fragments for name, value in one.newest.parameters.items()}

    def send(self, request: Request, body: bytes = b"") -> tuple[Reply, Any]:
        if self.is_down:
            raise ServerLostError("it is down")
        with self._changed:
            reply, answer = self._handle(request, body)
            if isinstance(request, Await):
                until = time.monotonic() + min(request.wait, 5.0)
                while isinstance(reply, NotYet) and time.monotonic() < until:
                    self._changed.wait(0.02)
                    reply, answer = self._handle(request, body)
        if type(request) in self.lose_answers_of:
            self.lose_answers_of.remove(type(request))
            raise ServerLostError("the answer was lost")
        return reply, answer

    def close(self) -> None:
        """There is nothing to close."""

    def _handle(self, request: Request, body: bytes) -> tuple[Reply, Any]:
        now = time.monotonic()
        if isinstance(request, Submit):
            self.submits.append(request)
            self._bodies[key(request)] = body
        reply = self.coordinator.handle(request, now)
        self.coordinator.tick(now)
        for closed in self.coordinator.take_closed():
            self._commit(closed, now)
        if isinstance(reply, Ready):
            fragment = self.fragments[reply.fragment]
            tensors = fragment.newest.update if reply.kind == "update" else fragment.newest.parameters
            codec = reply.codec if reply.kind == "update" else "fp32"
            return reply, write_body(dict(tensors) if reply.kind == "update" else encode(tensors, codec))
        return reply, b""

    def _commit(self, closed: Any, now: float) -> None:
        fragment = self.fragments[closed.fragment]
        contributions = [
            Contribution(read_body(self._bodies[key(one.submit)]), one.submit.codec, one.weight, one.scale)
            for one in closed.contributions
        ]
        version = fragment.step(contributions, closed.is_mean)
        fragment.newest = version
        self.digests[closed.fragment, version.number] = version.digest
        self.coordinator.committed(closed, version.digest, now)
        self._changed.notify_all()
