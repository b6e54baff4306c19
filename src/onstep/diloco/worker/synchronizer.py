"""Synchronizes a worker with the run, from start to stop, on all of its ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from onstep.diloco.client.membership import Tensors
from onstep.diloco.fragments import assign
from onstep.diloco.progress import Amount, Cycle, Progress
from onstep.diloco.protocol.messages import Registered
from onstep.diloco.worker.exchange import Exchange
from onstep.diloco.worker.heartbeat import HeartbeatThread
from onstep.diloco.worker.parameters import Parameters
from onstep.diloco.worker.ranks import on_main
from onstep.distributed.world import World

logger = logging.getLogger(__name__)


class Synchronizer:
    """Submits fragments and merges the versions that arrive. All methods are collective.

    Args:
        world: the ranks of the worker.
        parameters: of the model.
        exchange: on rank 0; None on the others.
        registered: the server's answer to the registration.
        sync_every: steps of a cycle.
    """

    def __init__(
        self,
        world: World,
        parameters: Parameters,
        exchange: Exchange | None,
        registered: Registered,
        sync_every: int | None,
    ) -> None:
        settings = registered.settings
        fragments = assign(parameters.specs, settings.num_fragments, settings.num_shares)
        self.world, self.registered = world, registered
        self.names = [[spec.name for spec in specs] for specs in fragments]
        """Of the parameters of each fragment."""
        self.cycle = Cycle(sync_every or settings.sync_every, settings.num_fragments, settings.num_shares)
        self.progress = Progress(len(fragments))
        self.heartbeat: HeartbeatThread | None = None
        """On rank 0, unless it is switched off."""
        self.exchange, self._parameters = exchange, parameters
        self._local_share = settings.blend if self.cycle.is_overlapped else None
        self._in_flight: set[int] = set()
        """Fragments that a thread waits for."""
        self._pending: set[int] = set()
        """Fragments whose submission is not merged, in flight or not."""

    @property
    def fragments(self) -> range:
        """Indices of all fragments."""
        return range(len(self.names))

    def resume(self, loaded: Mapping[str, Any] | None) -> None:
        """Give the model the server's versions, except where a restored model is at them already.

        Args:
            loaded: the state of the worker in a checkpoint.
        """
        state, mine = (None, []) if loaded is None else (loaded.get("exchange"), loaded["since_base"])
        # of rank 0, as a rank that the job did not have before has no state, and all ranks must exchange together
        local_step, steps = self.world.share(
            (0 if loaded is None else loaded["local_step"], [one["steps"] for one in mine])
        )
        tokens = [one["tokens"] for one in mine] or [0.0] * len(steps)
        if self.restore(state, list(map(Amount, tokens, steps))):
            self.cycle.step = min(local_step, self.cycle.length - 1)
        elif local_step:
            logger.warning("the run is past this checkpoint: %d local steps of this worker are discarded", local_step)

    def restore(self, state: Mapping[str, Any] | None, amounts: list[Amount]) -> bool:
        """Give the model the server's versions, but not of fragments whose restored progress still counts.

        Args:
            state: of the exchange, on rank 0.
            amounts: the restored progress of each fragment; empty if there is none.

        Returns:
            Whether some restored progress still counts.
        """
        is_any_kept = False
        for index in self.fragments:
            if on_main(self.world, self.exchange, partial(Exchange.open, index=index, state=state)):
                self.progress.restore(index, amounts[index])
                is_any_kept = True
            else:
                self._write(index, partial(_base, index=index))
        return is_any_kept

    def exchange_due(self, fragments: Iterable[int], cycle_seconds: float) -> None:
        """Submit the fragments that are due after a step, once all fragments in flight are merged."""
        on_main(self.world, self.exchange, self._check_heartbeat)
        self.merge_arrived(wait=True)
        if self._deliver_late(fragments):
            self.merge_arrived(wait=True)
        self.submit(fragments, cycle_seconds)
        if not self.cycle.is_overlapped:
            self.merge_arrived(wait=True)
        newest = on_main(self.world, self.exchange, lambda exchange: exchange.member.session.registered)
        self.registered = newest or self.registered

    def submit(self, fragments: Iterable[int], cycle_seconds: float) -> None:
        """Submit fragments, except those whose last submission is still pending and those without a new step."""
        for index in sorted(set(fragments) - self._pending):
            if not self.progress.has_steps(index):
                continue
            amount = self.progress.submit(index)
            tokens = round(sum(self.world.gather(amount.tokens)))
            local = self._parameters.read(self.names[index])
            options = {"tokens": tokens, "steps": amount.steps, "cycle_seconds": cycle_seconds}
            on_main(self.world, self.exchange, partial(Exchange.submit, index=index, local=local, **options))
            self._pending.add(index)
            self._in_flight.add(index)

    def merge_arrived(self, wait: bool) -> None:
        """Merge the versions that have arrived for fragments in flight; with `wait`, all, or until they time out."""
        if not self._in_flight:
            return
        indices = sorted(self._in_flight)
        arrived, self._in_flight = on_main(self.world, self.exchange, lambda exchange: exchange.collect(indices, wait))
        for index, is_counted in arrived.items():
            now = self._parameters.read(self.names[index]) if self.progress.has_moved(index) else {}
            self._write(index, partial(Exchange.merge, index=index, now=now, local_share=self._local_share))
            self.progress.end_submission(index, is_counted)
            self._pending.discard(index)

    def finish(self) -> None:
        """Submit all remaining steps and merge the results, as long as there is a quorum."""
        self._deliver_late(self.fragments)
        self._merge_last()
        self.submit(self.fragments, 0.0)
        self._merge_last()

    def _merge_last(self) -> None:
        if self._in_flight:
            on_main(self.world, self.exchange, Exchange.wait_for_others)
            self.merge_arrived(wait=False)
            self._in_flight = set()  # results that it did not wait for can be requested again

    def _deliver_late(self, fragments: Iterable[int]) -> bool:
        """Ask again for the results of submissions that timed out; whether there are any."""
        late = (set(fragments) & self._pending) - self._in_flight
        for index in late:
            on_main(self.world, self.exchange, partial(Exchange.deliver, index=index))
        self._in_flight |= late
        return bool(late)

    def _write(self, index: int, values: Callable[[Exchange], Tensors]) -> None:
        """Give the model values of rank 0, which stay there: `on_main` is for small results."""
        found: Tensors = {}
        on_main(self.world, self.exchange, lambda exchange: found.update(values(exchange)))
        self._parameters.write(self.names[index], found)

    def _check_heartbeat(self, exchange: Exchange) -> None:
        """Raise the refusal that a heartbeat was answered with."""
        if self.heartbeat is not None and self.heartbeat.error is not None:
            raise self.heartbeat.error


def _base(exchange: Exchange, index: int) -> Tensors:
    return exchange.fragments[index].base.parameters
