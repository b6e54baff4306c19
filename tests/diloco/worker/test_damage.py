"""A version that arrives with other bits than the server's is asked for again, and never trained on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from onstep.diloco.client.membership import Version, read_version
from onstep.diloco.codec.body import write_body
from onstep.diloco.codec.specs import InvalidTensorsError, specs_of
from onstep.diloco.protocol.messages import Ready, Reply, Request
from onstep.diloco.protocol.operations import Delivery
from tests.diloco.worker.crew import ALONE, batches, new_worker, small_model, train, values
from tests.diloco.worker.local_server import LocalServer


class DamagedLine(LocalServer):
    """Flips a bit of the last value in some of the versions that it sends."""

    num_damaged = 0

    def send(self, request: Request, body: bytes = b"") -> tuple[Reply, Any]:
        reply, answer = super().send(request, body)
        if isinstance(reply, Ready) and self.num_damaged:
            self.num_damaged -= 1
            answer = answer[:-1] + bytes([answer[-1] ^ 1])
        return reply, answer


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_a_damaged_version_is_fetched_again(codec: str) -> None:
    server = DamagedLine(values(small_model()), replace(ALONE, codec=codec))
    model, optimizer, worker = new_worker(server)
    with worker:
        train(model, optimizer, batches(0, 4)[:1])
        server.num_damaged = 2
        train(model, optimizer, batches(0, 4)[1:])
        assert server.num_damaged == 0
        assert worker.sync_metrics["diloco/version"] == 2
        assert all(torch.equal(values(model)[name], value) for name, value in server.parameters().items())


def test_versions_that_are_always_damaged_are_refused() -> None:
    server = DamagedLine(values(small_model()), ALONE)
    model, optimizer, worker = new_worker(server)
    worker.start()
    server.num_damaged = 100
    with pytest.raises(InvalidTensorsError, match="arrived 3 times with another hash than the server's"):
        train(model, optimizer, batches(0, 2))
    worker.stop(merge=False)


def test_an_update_is_added_to_the_version_before_it_only() -> None:
    base, update = Version(1, {"w": torch.ones(2)}), write_body({"w": torch.ones(2)})
    next_one, later = (
        read_version(Delivery(Ready(0, number, "update"), update), specs_of(base.parameters), base) for number in (2, 3)
    )
    assert next_one is not None
    assert torch.equal(next_one.parameters["w"], torch.full((2,), 2.0))
    assert later is None
