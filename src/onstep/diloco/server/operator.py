"""Answers what an operator asks about a served run, and changes it."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from onstep.diloco.outer import follow_workers, set_rate
from onstep.diloco.protocol.messages import PROTOCOL_VERSION, Settings
from onstep.diloco.protocol.relay import RELAYED, relayed_command
from onstep.diloco.server.served_run import ServedRun

logger: logging.Logger = logging.getLogger(__name__)


class Operator:
    """Status and changes of one run; used in its loop.

    Args:
        run: the run.
        save_dir: where the server saves; None if it does not.
        save: writes the weights for other programs, in the thread of the tensor work; None without a directory.
        shut_down: ends the server, soon.
    """

    def __init__(
        self,
        run: ServedRun,
        *,
        save_dir: Path | None = None,
        save: Callable[[int], None] | None = None,
        shut_down: Callable[[], None] = lambda: None,
    ) -> None:
        self._run = run
        self._save_dir = save_dir
        self._save = save
        self._shut_down = shut_down
        self._started_at = time.time()
        self._started = run.now()

    @property
    def saves(self) -> bool:
        """Whether there is a directory to save to."""
        return self._save is not None

    def info(self) -> dict[str, Any]:
        """What a client has to know before it joins."""
        coordinator = self._run.coordinator
        return {
            "protocol_version": PROTOCOL_VERSION,
            "run_id": coordinator.run_id,
            "fingerprint": coordinator.fingerprint,
            "settings": {**asdict(coordinator.settings), "num_shares": 1},
            "share": 0,  # with the one before, workers of version 0.5 register, and the refusal says what differs
        }

    def status(self) -> dict[str, Any]:
        """Everything that `onstep diloco status` shows; JSON."""
        run = self._run
        settings, now = run.coordinator.settings, run.now()
        decided = run.coordinator.status(now)
        return {
            "status": "running" if run.disk_error is None else "waiting for the disk",
            **decided,
            "sync_round": run.num_rounds,
            **_shown_settings(settings),
            "pending_submissions": run.num_bodies,
            "held_back": list(run.held_back),
            "kept_versions": run.versions(),
            "started_at": self._started_at,
            "uptime_seconds": now - self._started,
            **self.rates(),
            **run.telling.status(now, len(run.coordinator.workers) >= settings.min_workers),
            "save_dir": None if self._save_dir is None else str(self._save_dir),
            "disk_error": run.disk_error,
            "model_params": sum(math.prod(spec.shape) for part in run.fragments for spec in part.specs),
            "model_size_mb": sum(tensor.nbytes for tensor in self._broadcast().values()) / 1e6,
            "digests": [part.newest.digest for part in run.fragments],
            "pid": os.getpid(),
        }

    def workers(self) -> list[str]:
        """The registered workers."""
        return list(self._run.coordinator.workers)

    def rates(self) -> dict[str, float | None]:
        """Learning rate and momentum of the outer optimizer."""
        group = self._run.fragments[0].optimizer.param_groups[0]
        momentum = group.get("momentum")
        return {"outer_lr": float(group["lr"]), "outer_momentum": None if momentum is None else float(momentum)}

    def parameters(self) -> dict[str, Tensor]:
        """The newest parameters as workers have them."""
        return self._broadcast()

    async def set_rates(self, lr: float | None, momentum: float | None) -> None:
        """Change the outer optimizer, durably and between two rounds. Raises ConfigError for values out of range."""

        def change() -> None:
            for part in self._run.fragments:
                set_rate(part.optimizer, lr, momentum)

        await self._run.compute(change)
        await self._run.save_change()
        now = self.rates()
        logger.info("An operator set the outer lr to %s, the momentum to %s", now["outer_lr"], now["outer_momentum"])

    async def set_num_workers(self, number: int) -> None:
        """Expect another number of workers, durably. Raises ConfigError if it is below the quorum.

        The defaults of asynchronous mode follow.
        """
        before = self._run.coordinator.settings.num_workers
        self._run.change(lambda coordinator, now: coordinator.set_num_workers(number, now))

        def follow() -> None:
            for part in self._run.fragments:
                follow_workers(part.optimizer, before, number)

        await self._run.compute(follow)
        await self._run.save_change()
        logger.info("An operator set the number of expected workers from %d to %d", before, number)

    async def kick(self, worker_id: str) -> bool:
        """Remove a worker; whether there was one. It learns it by its next request."""
        found = bool(self._run.change(lambda coordinator, now: coordinator.evict(worker_id, now)))
        await self._run.save_change()
        return found

    async def command(self, name: str) -> int:
        """Give a command to all workers, durably; returns its number. Each gets it with its next round or heartbeat."""
        relayed = relayed_command(name)
        number = int(self._run.change(lambda coordinator, now: coordinator.command(relayed)))
        await self._run.save_change()
        logger.info(
            "An operator orders all workers to %s; each does after its next round or heartbeat",
            RELAYED[relayed],
        )
        return number

    def go_back(self, version: int) -> None:
        """Continue all fragments from an earlier version. Raises ConfigError for one that is not kept."""
        self._run.go_back(version)

    async def save_state(self) -> int:
        """Write the weights for other programs; returns the number of rounds in them."""
        save, number = self._save, self._run.num_rounds
        assert save is not None
        await self._run.compute(lambda: save(number))
        return number

    def shut_down(self) -> None:
        """End the server, soon."""
        self._shut_down()

    def _broadcast(self) -> dict[str, Tensor]:
        return {name: tensor for part in self._run.fragments for name, tensor in part.newest.parameters.items()}


def _shown_settings(settings: Settings) -> dict[str, Any]:
    shown = asdict(settings)
    shown["dylu_enabled"] = shown.pop("dylu")
    return shown
