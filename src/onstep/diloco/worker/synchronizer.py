"""Submits fragments and merges what arrives, on all ranks of a worker."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

from onstep.diloco.client.versions import Tensors
from onstep.diloco.worker.exchange import Exchange
from onstep.diloco.worker.parameters import Parameters
from onstep.diloco.worker.progress import Progress
from onstep.diloco.worker.ranks import on_main
from onstep.distributed.world import World

T = TypeVar("T")


class Synchronizer:
    """The steps of an exchange in which every rank participates; all methods are collective.

    Args:
        exchange: the server's side of it on rank 0, None on others.
        names: of the parameters of each fragment.
        local_share: share of the local parameters when a fragment that was in flight is merged; None keeps the
            progress that was made meanwhile as it is.
    """

    def __init__(
        self,
        world: World,
        parameters: Parameters,
        exchange: Exchange | None,
        names: list[list[str]],
        progress: Progress,
        local_share: float | None,
    ) -> None:
        self._world, self._parameters, self._exchange = world, parameters, exchange
        self._names, self._progress, self._local_share = names, progress, local_share
        self.in_flight: set[int] = set()
        """Fragments that a thread waits for."""
        self._pending: set[int] = set()
        """Fragments whose submission is not merged, in flight or not."""

    def submit(self, indices: Iterable[int], cycle_seconds: float) -> None:
        """Submit fragments, but for those whose last submission is still pending and those without a new step."""
        for index in sorted(set(indices) - self._pending):
            if not self._progress.has_steps(index):
                continue
            amount = self._progress.submit(index)
            tokens = round(sum(self._world.gather(amount.tokens)))
            local = self._parameters.read(self._names[index])
            self._on_main(partial(_submit, index, local, tokens, amount.steps, cycle_seconds))
            self._pending.add(index)
            self.in_flight.add(index)

    def retry(self, indices: Iterable[int]) -> None:
        """Ask again about submissions of fragments that were not settled in time, and wait."""
        if self._ask_again(indices):
            self.land(wait=True)

    def finish(self, indices: Iterable[int]) -> None:
        """Settle what is pending, submit what is left and merge the results, as long as there is a quorum."""
        self._ask_again(indices)
        self._land_last()
        self.submit(indices, 0.0)
        self._land_last()

    def _land_last(self) -> None:
        if self.in_flight:
            self._on_main(lambda exchange: exchange.wait_for_others())
            self.land(wait=False)
            self.in_flight = set()  # what it did not wait for is asked about again, if anybody asks

    def _ask_again(self, indices: Iterable[int]) -> set[int]:
        late = (set(indices) & self._pending) - self.in_flight
        if late:
            self._on_main(partial(_settle, late))
            self.in_flight |= late
        return late

    def land(self, wait: bool) -> None:
        """Merge what has arrived of the fragments in flight; with `wait`, all of them or until they time out."""
        if not self.in_flight:
            return
        landed, self.in_flight = self._on_main(partial(_collect, sorted(self.in_flight), wait))
        for index, is_counted in landed.items():
            now = self._parameters.read(self._names[index]) if self._progress.has_moved(index) else {}
            self._write(index, partial(_merge, index, now, self._local_share))
            self._progress.settle(index, is_counted)
            self._pending.discard(index)

    def give(self, index: int) -> None:
        """Give the model the version of a fragment."""
        self._write(index, lambda exchange: exchange.fragments[index].base)

    def _write(self, index: int, values: Callable[[Exchange], Tensors]) -> None:
        merged: Tensors = {}
        self._on_main(lambda exchange: merged.update(values(exchange)))
        self._parameters.write(self._names[index], merged)

    def _on_main(self, work: Callable[[Exchange], T]) -> T:
        def run() -> T:
            assert self._exchange is not None
            return work(self._exchange)

        return on_main(self._world, run)


def _submit(index: int, local: Tensors, tokens: int, steps: int, cycle_seconds: float, exchange: Exchange) -> None:
    exchange.submit(exchange.fragments[index], local, tokens=tokens, steps=steps, cycle_seconds=cycle_seconds)


def _settle(indices: set[int], exchange: Exchange) -> None:
    for index in indices:
        exchange.settle(exchange.fragments[index])


def _collect(indices: list[int], wait: bool, exchange: Exchange) -> tuple[dict[int, bool], set[int]]:
    """Fragments that can be merged, with whether their submission was counted; and those still in flight."""
    fragments = [exchange.fragments[index] for index in indices]
    landed = {one.index: exchange.was_counted(one) for one in fragments if exchange.collect(one, wait)}
    return landed, {one.index for one in fragments if exchange.is_under_way(one)}


def _merge(index: int, now: Tensors, local_share: float | None, exchange: Exchange) -> Tensors:
    return exchange.merge(exchange.fragments[index], now, local_share)
