"""Servers and workers that the tests of this room share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor

from onstep.diloco.client import DiLoCoClient
from onstep.diloco.protocol.messages import Settings
from onstep.diloco.server import DiLoCoServer
from tests.support.diloco.raw_worker import RawWorker
from tests.support.waiting import PATIENCE


@pytest.fixture
def parameters() -> dict[str, Tensor]:
    """Those of a model with two blocks, an odd shape and a scalar."""
    generator = torch.Generator().manual_seed(7)
    shapes = {"blocks.0.weight": (6, 5), "blocks.1.weight": (6, 5), "head.bias": (7,), "head.scale": ()}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.fixture
def serve(parameters: dict[str, Tensor]) -> Iterator[Callable[..., DiLoCoServer]]:
    """Starts servers of the parameters, of one worker unless settings are given."""
    with ExitStack() as stack:

        def start(model: Any = None, **options: Any) -> DiLoCoServer:
            options.setdefault("settings", Settings(min_workers=1, heartbeat_timeout=0.0))
            options.setdefault("port", 0)
            server = DiLoCoServer(parameters if model is None else model, **options)
            stack.callback(server.stop)
            server.start()
            return server

        yield start


@pytest.fixture
def worker(parameters: dict[str, Tensor]) -> Iterator[Callable[..., RawWorker]]:
    """Makes workers of a server."""
    with ExitStack() as stack:

        def make(server: DiLoCoServer, worker_id: str = "a", model: dict[str, Tensor] | None = None) -> RawWorker:
            client = stack.enter_context(
                DiLoCoClient(server.address, timeout=PATIENCE, max_retries=0, token=server.token or "")
            )
            return RawWorker(client, worker_id, parameters if model is None else model)

        yield make
