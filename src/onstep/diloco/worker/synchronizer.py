"""Synchronizes a worker with the run, from start to stop, on all of its ranks."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onstep.diloco.fragments import assign
from onstep.diloco.progress import Amount, Cycle, Progress
from onstep.diloco.protocol.messages import Registered
from onstep.diloco.worker.exchange import Exchange
from onstep.diloco.worker.heartbeat import HeartbeatThread
from onstep.diloco.worker.holdings import Holdings
from onstep.diloco.worker.parameters import Parameters
from onstep.diloco.worker.ranks import on_main
from onstep.distributed.shards import as_dtensor, held_part
from onstep.distributed.world import World

logger = logging.getLogger(__name__)
_AMOUNTS = ("since_base", "since_submission")
"""Of a worker's state: the work of each fragment since its version, and since it was submitted."""


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
        fragments = assign(parameters.specs, settings.num_fragments)
        self.world, self.registered = world, registered
        self.names = [[spec.name for spec in specs] for specs in fragments]
        """Of the parameters of each fragment."""
        self.cycle = Cycle(sync_every or settings.sync_every, settings.num_fragments)
        self.progress = Progress(len(fragments))
        self.heartbeat: HeartbeatThread | None = None
        """On rank 0, unless it is switched off."""
        self.is_overlapped = settings.is_overlapped
        """Whether training continues while a fragment is in flight."""
        self.exchange = exchange
        self.holdings = Holdings(world, parameters, self.names, exchange, keeps_submitted=self.is_overlapped)
        self._overlap_steps, self._is_eager = settings.overlap_steps, settings.eager
        self._local_share = settings.blend if self.is_overlapped and not self._is_eager else None
        self._in_flight: set[int] = set()
        """Fragments that a thread waits for."""
        self._pending: set[int] = set()
        """Fragments whose submission is not merged, in flight or not."""
        self.has_resumed = False
        """Whether work of an earlier process on fragment 0 counts that was not submitted when this one registered."""
        self.times_over = 0
        """How often the worker has given up steps and started over."""

    @property
    def fragments(self) -> range:
        """Indices of all fragments."""
        return range(len(self.names))

    def divided_state(self) -> dict[str, Any]:
        """What each rank has a part of: see `Holdings.state_dict`; and the tokens of each rank. Not collective.

        The latter are those since each fragment's version, and since it was submitted: (ranks, 2, fragments).
        """
        amounts = [(self.progress.since_base(index), self.progress.since_submission(index)) for index in self.fragments]
        row = torch.tensor([[one.tokens for one in kind] for kind in zip(*amounts, strict=True)], dtype=torch.float64)
        return {**self.holdings.state_dict(), "tokens": self.holdings.parameters.parts.of_ranks(row)}

    def resume(self, loaded: Mapping[str, Any] | None, tokens_of_ranks: Tensor | None) -> None:
        """Give the model the server's versions, except where a restored model is at them already.

        Args:
            loaded: the state of the worker in a checkpoint.
            tokens_of_ranks: as in `divided_state`; a whole tensor may be of any number of ranks.
        """
        state, mine = (None, {}) if loaded is None else (loaded.get("exchange"), loaded)
        # steps of rank 0, as a rank that the job did not have before has no state, and all must exchange together
        local_step, *steps = self.world.share((mine.get("local_step", 0), *(_steps(mine, key) for key in _AMOUNTS)))
        if tokens_of_ranks is None:
            tokens = [[one["tokens"] for one in mine.get(key, ())] for key in _AMOUNTS]
        else:  # those of another number of ranks belong to rank 0
            is_own = self.world.is_main or as_dtensor(tokens_of_ranks) is not None
            tokens = (held_part(tokens_of_ranks).sum(0) * is_own).tolist()
        has_resent = on_main(self.world, self.exchange, lambda exchange: exchange.has_resent)
        kept = self.restore(state, *(_amounts(*one) for one in zip(tokens, steps, strict=True)))
        self.has_resumed = has_resent or 0 in kept
        if kept:
            self.cycle.step = min(local_step, self.cycle.length - 1)
        elif local_step and not any(self._was_never_sent(index) for index in self.fragments):
            logger.warning(
                "DiLoCo: the run is past this checkpoint: %d local steps of this worker are discarded", local_step
            )

    def restore(
        self, state: Mapping[str, Any] | None, amounts: list[Amount], since_submission: list[Amount]
    ) -> set[int]:
        """Give the model the server's versions, but not of fragments whose restored progress still counts.

        Args:
            state: of the exchange, on rank 0.
            amounts: the restored progress of each fragment; empty if there is none.
            since_submission: the part of it that is later than the fragment's last submission.

        Returns:
            The fragments whose restored progress still counts.
        """
        kept = set[int]()
        for index in self.fragments:
            restored = self.holdings.open(index, state)
            if restored != "nothing":
                kept.add(index)
                is_in_flight = restored == "in flight"
                self.progress.restore(index, amounts[index], since_submission[index] if is_in_flight else None)
                self._pending |= {index} if is_in_flight else set()
                self._in_flight |= {index} if is_in_flight else set()
                continue
            if self.exchange is not None and amounts and amounts[index].steps and self._was_never_sent(index):
                self.exchange.note_lost(index, amounts[index].steps)
        return kept

    def _was_never_sent(self, index: int) -> bool:
        """Whether the server has no submission of the fragment that is later than the restored state."""
        return self.exchange is not None and not self.exchange.has_newer_work(index)

    def exchange_due(self, fragments: Iterable[int]) -> None:
        """Submit the fragments that are due after a step, once their last submissions are merged.

        So are all others in flight, unless each is merged a fixed number of steps after its submission. After an outage
        all fragments are due, as a round of one may wait for workers that wait for a round of another.
        """
        on_main(self.world, self.exchange, self._check_heartbeat)
        fragments = set(fragments)
        awaited = self._in_flight if self._overlap_steps is None else fragments
        self.merge_arrived(wait=True, unless_lost=True, only=awaited)
        if late := self._deliver_late(self.fragments):
            self.merge_arrived(wait=True, unless_lost=True, only=awaited | fragments | late)
        overdue = {index for index in self.fragments if self.progress.num_steps(index) > self.cycle.length}
        submitted = self.submit(fragments | overdue)
        if self._is_eager:
            for index in submitted:
                self.holdings.go_ahead(index)
        if not self.is_overlapped:
            self.merge_arrived(wait=True, unless_lost=True)
        newest = on_main(self.world, self.exchange, lambda exchange: exchange.member.session.registered)
        self.registered = newest or self.registered

    def submit(self, fragments: Iterable[int]) -> list[int]:
        """Submit fragments, except those whose last submission is still pending and those without a new step.

        Returns:
            Those that were submitted.
        """
        due = [index for index in sorted(set(fragments) - self._pending) if self.progress.num_steps(index)]
        loss = self._mean_loss() if due else None
        for index in due:
            amount = self.progress.submit(index)
            tokens = round(sum(self.world.gather(amount.tokens)))
            self.holdings.submit(index, tokens=tokens, steps=amount.steps, loss=loss)
            self._pending.add(index)
            self._in_flight.add(index)
        return due

    def _mean_loss(self) -> float | None:
        """The mean loss of all ranks since the last call; None if it is not known, or not finite."""
        sums = self.world.gather(self.progress.take_losses())
        losses, weight = (sum(one[part] for one in sums) for part in (0, 1))
        mean = losses / weight if weight > 0 else math.nan
        return mean if math.isfinite(mean) else None

    def merge_due(self) -> bool:
        """After a step, merge what has arrived, or what is due after this very step; whether that was waited for."""
        if self._overlap_steps is None:
            self.merge_arrived(wait=False)
            return False
        steps = self.progress.steps_since_submission
        due = {index for index in self._in_flight if steps(index) >= self._overlap_steps}
        self.merge_arrived(wait=True, unless_lost=True, only=due)
        return bool(due)

    def merge_arrived(self, wait: bool, unless_lost: bool = False, only: Collection[int] | None = None) -> None:
        """Merge the versions that have arrived for fragments in flight.

        Args:
            wait: for all, or until they time out.
            unless_lost: do not wait while the server does not answer: what comes later is merged after a later step.
            only: these fragments; None for all.
        """
        indices = sorted(self._in_flight if only is None else self._in_flight & set(only))
        if not indices:
            return
        arrived, waiting = on_main(
            self.world, self.exchange, lambda exchange: exchange.collect(indices, wait, unless_lost)
        )
        self._in_flight = self._in_flight - set(indices) | waiting
        times_over = self.times_over
        for index, fate in arrived.items():
            has_moved = self.progress.steps_since_submission(index) > 0
            self.holdings.merge(index, fate, has_moved, self._local_share)
            self.progress.end_submission(index, is_counted=fate in ("counted", "late", "outdated"))
            if fate in ("outdated", "given up"):
                self._start_over(index)
            self._pending.discard(index)
        if self.times_over != times_over:
            self.registered = on_main(self.world, self.exchange, Exchange.register_again)

    def _start_over(self, index: int) -> None:
        """Give up the steps that no submission of the fragment contains that counted."""
        steps, later = self.progress.since_base(index).steps, self.progress.since_submission(index).steps
        self.progress.restore(index, Amount())
        self.times_over += index == 0  # by whose submissions the share of the data is counted
        if steps and self.exchange is not None:
            self.exchange.note_lost(index, steps, submitted=steps - later)

    def finish(self) -> None:
        """Submit all remaining steps and merge the results, as long as there is a quorum."""
        self._deliver_late(self.fragments)
        self._merge_last()
        self.submit(self.fragments)
        self._merge_last()

    def keep_unsent(self, path: Path) -> int:
        """Write to a file what no server has got, since it did not answer; after `finish`. Returns the steps."""
        unsent = [
            one for one in sorted(self._pending) if on_main(self.world, self.exchange, partial(_unsent, index=one))
        ]
        loss = self._mean_loss() if unsent else None
        for index in unsent:
            amount = self.progress.since_submission(index)
            tokens = round(sum(self.world.gather(amount.tokens)))
            self.holdings.keep(index, tokens=tokens, steps=amount.steps, loss=loss)
        if not unsent:
            return 0
        return on_main(self.world, self.exchange, lambda exchange: exchange.write_kept(path))

    def _merge_last(self) -> None:
        if self._in_flight:
            on_main(self.world, self.exchange, Exchange.wait_for_others)
            self.merge_arrived(wait=False)
            self._in_flight = set()  # results that it did not wait for can be requested again

    def _deliver_late(self, fragments: Iterable[int]) -> set[int]:
        """Ask again for the results of submissions that timed out; returns those fragments."""
        late = (set(fragments) & self._pending) - self._in_flight
        for index in late:
            self.holdings.deliver(index)
        self._in_flight |= late
        return late

    def _check_heartbeat(self, exchange: Exchange) -> None:
        """Raise the refusal that a heartbeat was answered with."""
        if self.heartbeat is not None and self.heartbeat.error is not None:
            raise self.heartbeat.error


def _steps(loaded: Mapping[str, Any], key: str) -> list[int]:
    return [one["steps"] for one in loaded.get(key, ())]


def _amounts(tokens: list[float], steps: list[int]) -> list[Amount]:
    """The restored amounts of work; tokens are this rank's own."""
    return list(map(Amount, tokens or [0.0] * len(steps), steps))


def _unsent(exchange: Exchange, index: int) -> bool:
    return exchange.is_unsent(index)
