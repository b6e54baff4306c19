"""Holds what a worker has between start and stop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from onstep.diloco.protocol.messages import Registered
from onstep.diloco.worker.exchange import Exchange
from onstep.diloco.worker.heartbeat import HeartbeatThread
from onstep.diloco.worker.progress import Cycle, Progress
from onstep.diloco.worker.synchronizer import Synchronizer
from onstep.distributed.world import World


@dataclass
class Work:
    """What a worker has between start and stop."""

    world: World
    registered: Registered
    exchange: Exchange | None
    """On rank 0."""
    cycle: Cycle
    progress: Progress
    synchronizer: Synchronizer
    is_dynamic: bool
    step: int
    heartbeat: HeartbeatThread | None = None

    @property
    def fragments(self) -> range:
        """All of the run's."""
        return range(len(self.registered.versions))

    def open(self, index: int, state: Mapping[str, Any] | None) -> bool:
        """Fetch a fragment, on rank 0; see `Exchange.open`."""
        exchange = existing(self.exchange)
        return exchange.open(exchange.fragments[index], state)

    def count(self, tokens: Tensor | float) -> None:
        """Count a step."""
        self.progress.count(tokens)
        self.step += 1
        if self.exchange is not None:
            self.exchange.session.step = self.step

    def last_registered(self) -> Registered:
        """The newest answer to a registration."""
        return existing(self.exchange).session.registered or self.registered

    def check_heartbeat(self) -> None:
        """Raise why the server no longer accepts this worker, if it has said so to a heartbeat."""
        if self.heartbeat is not None and self.heartbeat.error is not None:
            raise self.heartbeat.error

    def leave(self) -> None:
        """Deregister, and end what is under way."""
        if self.heartbeat is not None:
            self.heartbeat.stop()
        if self.exchange is not None:
            self.exchange.leave()


def existing(exchange: Exchange | None) -> Exchange:
    """The exchange, on rank 0."""
    assert exchange is not None
    return exchange
