"""Exchanges the ranks' reports through the process group's store, outside of the collectives."""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, BinaryIO

import torch.distributed as dist

from onstep.training.watchdog import stacks as rank_stacks
from onstep.training.watchdog.diagnosis import SILENT_BEATS, FailureDiagnosis
from onstep.training.watchdog.rank_report import TERMINATED, RankReport

LINGER_SECONDS = 20.0
"""How long the rank with the store waits at most, once all have reached the end, for the others to have seen that."""
LEAVING_SECONDS = 1.0
"""How long it waits, beside the time between their looks, if it exits before the end, so that the others see that."""
KNOWING_SECONDS = 10.0
"""How long it waits at most for the others to have read the diagnosis, without which they would take it for the first
that failed."""

_PREFIX = "onstep_watchdog"
_URGENT_SECONDS = 0.05
_ANSWER_SECONDS = 5.0


class RankExchange(threading.Thread):
    """A thread that publishes this rank's record and reads those of other ranks, once per interval.

    The store holds one record per rank, after a diagnosis one text of stacks per rank, and three more keys. The lowest
    rank that is still reporting reads all records; the others read only that rank's, so that the store answers a few
    small requests of each rank per interval.
    """

    def __init__(self, rank: int, size: int, interval: float) -> None:
        super().__init__(name="onstep-rank-exchange", daemon=True)
        self.rank = rank
        self.size = size
        self.interval = interval
        self.record = RankReport(rank)
        """The record to publish next."""
        self.leader = 0
        """The diagnosing rank, as far as this one knows."""
        self.proposal: FailureDiagnosis | None = None
        """This rank's own diagnosis; it counts if this is the diagnosing rank."""
        self.decision: FailureDiagnosis | None = None
        self.is_reported = False
        self.stacks: str | None = None
        """The stacks of this rank, to be published."""
        self.wants_stacks = False
        """Whether this rank collects the stacks of all ranks."""
        self.collected: dict[int, str] = {}
        self.report_is_out = False
        """Set by the reporting rank once its report is written."""
        self.last_answer = time.monotonic()
        """When the store last answered."""
        self.is_urgent = False
        self._seen: dict[int, RankReport] = {}
        """The newest record of each other rank."""
        self._seen_at: dict[int, float] = {}
        """When that record arrived."""
        self._files: dict[int, BinaryIO] = {}
        """The files of ranks on this machine: open, so that their last words outlive the cleaning up of others."""
        self._order = 0
        self._tick = 0
        self._wake = threading.Event()
        self.has_published = threading.Event()
        """Set once this rank's first record is in the store."""
        self.has_met = threading.Event()
        """Set once it has also read a record of rank 0, which nobody can read any more if the store ends with it."""
        self.has_published_failure = threading.Event()
        """Set once its failure is in the store, or could not be written to it."""
        self._stopping = False
        shared: Any = dist.distributed_c10d._get_default_store()
        self._store: Any = shared.clone()  # a separate connection: no lock is shared
        self._store.set_timeout(timedelta(seconds=_ANSWER_SECONDS))
        session = int(self._store.add(f"{_PREFIX}/sessions/{rank}", 1))  # ranks watch the same runs in the same order
        self._names = [f"{_PREFIX}/{session}/{what}" for what in ("diagnosis", "reported", "order")]
        self._keys = [f"{_PREFIX}/{session}/rank/{one}" for one in range(size)]
        self._stack_keys = [f"{_PREFIX}/{session}/stacks/{one}" for one in range(size)]
        # the last session but one is no longer read: there were collectives in between
        self._store.delete_key(f"{_PREFIX}/{session - 2}/rank/{rank}")

    def run(self) -> None:
        """Exchange records until stopped, or until the store is gone for good."""
        while True:
            is_last, has_failed = self._stopping, self.record.failure is not None
            try:
                self._exchange()
            except (RuntimeError, ValueError):  # torch's network errors; the watchdog decides what to do
                pass
            else:
                self.last_answer = time.monotonic()
                self.has_published.set()
                if self.rank == 0 or 0 in self._seen:
                    self.has_met.set()
            if has_failed:
                self.has_published_failure.set()
            if is_last:
                return
            self._wake.wait(_URGENT_SECONDS if self.is_urgent or not self.has_met.is_set() else self.interval)
            self._wake.clear()

    def hurry(self) -> None:
        """Exchange now."""
        self._wake.set()

    def forgive(self, seconds: float) -> None:
        """Measure the silence of other ranks from a time later by this much."""
        self.last_answer += seconds
        for rank, at in list(self._seen_at.items()):
            self._seen_at[rank] = min(time.monotonic(), at + seconds)

    def stop(self, linger_seconds: float) -> None:
        """Publish the last record and end, at most a second later if the store does not answer.

        Args:
            linger_seconds: how long to wait for the other ranks to leave too, without a failure, or to know of it.
        """
        self.is_urgent = True
        self._wake.set()
        deadline = time.monotonic() + linger_seconds
        while (
            time.monotonic() < deadline
            and self.is_alive()
            and not all(self._needs_no_store(rank, record) for rank, record in list(self._seen.items()))
        ):
            time.sleep(_URGENT_SECONDS / 5)
        self._stopping = True
        self._wake.set()
        self.join(1.0)
        for file in self._files.values():
            file.close()

    def _needs_no_store(self, rank: int, record: RankReport) -> bool:
        """Whether another rank reads nothing more: it has left the run, or knows why it ends, or cannot be reached."""
        if self.decision is None or record.left is not None:
            return record.is_over
        is_first = self.decision.rank == rank and self.decision.kind in ("died", "hung")
        is_here = record.host == self.record.host != ""
        is_gone = is_here and rank_stacks.state_of(record.pid, record.birth) == "gone"
        return record.knows_diagnosis or is_first or is_gone

    def rank_reports(self) -> dict[int, RankReport]:
        """All ranks as this one sees them, including itself."""
        now, host = time.monotonic(), self.record.host
        found = {self.rank: self._in_order(self.record)}
        step = max([self.record.step, *(record.step for record in list(self._seen.values()))])
        for rank, record in list(self._seen.items()):
            silence = now - self._seen_at[rank]
            silence = 0.0 if silence < 2 * self.interval else silence
            is_here = bool(host) and record.host == host and silence > 0
            state = rank_stacks.state_of(record.pid, record.birth) if is_here else "unknown"
            is_gone, is_stopped = state == "gone", state == "stopped"
            one = replace(record, silence=silence, step_of_others=step, is_gone=is_gone, is_stopped=is_stopped)
            words = self.last_words(rank) if one.silence > 0 and not one.is_over else None
            found[rank] = one if words is None else one.at_last(words)
        return found

    def last_words(self, rank: int) -> rank_stacks.LastWords | None:
        """What the process of another rank last did; None if it is not on this machine."""
        try:
            return rank_stacks.last_words(self._files[rank].fileno())
        except (KeyError, OSError, ValueError):
            return None

    def has_lost_rank(self) -> bool:
        """Whether the process of a rank on this machine is gone, and SIGTERM has not ended it.

        The lowest rank knows all, the others only that one. It acquires no locks, and at first waits for their reports.
        """
        deadline = time.monotonic() + 2 * self.interval + 1
        while not (self.knows_all or (self.leader != self.rank and self._seen)) and time.monotonic() < deadline:
            time.sleep(_URGENT_SECONDS / 5)
        for rank, record in list(self._seen.items()):
            is_gone = rank in self._files and rank_stacks.state_of(record.pid, record.birth) == "gone"
            words = self.last_words(rank) if is_gone else None
            if words is not None and words.activity != TERMINATED:
                return True
        return False

    @property
    def knows_all(self) -> bool:
        """Whether every other rank has reported at least once."""
        return len(self._seen) == self.size - 1

    @property
    def all_are_done(self) -> bool:
        """Whether all ranks have reached the end of the run: the lowest that still reports knows, the others ask it."""
        lowest = self._seen.get(self.leader)
        if lowest is not None:
            return lowest.left == 0 and lowest.is_done
        return self.leader == self.rank and self.knows_all and all(one.is_done for one in self._seen.values())

    def _exchange(self) -> None:
        self._publish()
        self._read()
        diagnosis, reported, _ = self._names
        if self.decision is None and self.proposal is not None:
            text = json.dumps(vars(self.proposal))
            self.decision = FailureDiagnosis(**json.loads(self._store.compare_set(diagnosis, "", text)))
        if self.decision is None and self._store.check([diagnosis]):
            self.decision = FailureDiagnosis(**json.loads(self._store.get(diagnosis)))
        if self.decision is None:
            return
        if self.stacks is not None:
            self._store.set(self._stack_keys[self.rank], self.stacks)
            self.stacks = None
        for one, key in enumerate(self._stack_keys if self.wants_stacks else []):
            if one not in self.collected and self._store.check([key]):
                self.collected[one] = self._store.get(key).decode()
        if self.report_is_out:
            self._store.set(reported, "1")
        self.is_reported = self._store.check([reported])

    def _publish(self) -> None:
        self._tick += 1
        record = self.record
        if record.failure is not None and not self._order:
            self._order = int(self._store.add(self._names[2], 1))
        knows = self.decision is not None
        mine = replace(self._in_order(record), tick=self._tick, knows_diagnosis=knows)
        self._store.set(self._keys[self.rank], mine.encode())

    def _in_order(self, record: RankReport) -> RankReport:
        if record.failure is None:
            return record
        return replace(record, failure=replace(record.failure, order=self._order or self.size + 1))

    def _read(self) -> None:
        while self.leader < self.rank:
            self._look_at([self.leader])
            seen = self._seen.get(self.leader)
            if seen is None:
                return
            is_silent = time.monotonic() - self._seen_at[self.leader] >= max(1.0, SILENT_BEATS * self.interval)
            if seen.left is None and not is_silent:
                return
            self.leader += 1
        self._look_at([one for one in range(self.size) if one != self.rank])

    def _look_at(self, ranks: list[int]) -> None:
        there = [one for one in ranks if one in self._seen]
        there += [one for one in ranks if one not in self._seen and self._store.check([self._keys[one]])]
        for rank, data in zip(there, self._store.multi_get([self._keys[one] for one in there]), strict=True):
            record = RankReport.decode(data)
            seen = self._seen.get(rank)
            if seen is None and record.host == self.record.host != "":
                with suppress(OSError):
                    self._files[rank] = open(record.dump_path, "rb")  # noqa: SIM115 - until the end of the run
            if seen is None or seen.tick != record.tick:
                self._seen_at[rank], self._seen[rank] = time.monotonic(), record
