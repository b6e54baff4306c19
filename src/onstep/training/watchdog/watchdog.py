"""Ends a run in which a rank hangs, fails or dies: on all ranks, within a time limit, with one report of the first.

On each rank a thread observes what the rank is doing (`onstep.processes.heartbeat`); with several ranks a second one
exchanges this with the others through the process group's store. Neither uses the training's collectives, and the
training itself only writes a few attributes.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import torch.distributed as dist

from onstep.errors import ConfigError, RankFailedError
from onstep.processes.heartbeat import HEARTBEAT
from onstep.training.compute.step import Step
from onstep.training.feature import Feature, Interruption
from onstep.training.run import Run
from onstep.training.watchdog import stacks as rank_stacks
from onstep.training.watchdog.diagnosis import (
    ANSWER_SECONDS,
    CONSEQUENCE_SECONDS,
    FailureDiagnosis,
    Suspicion,
    decide_on,
    diagnose,
    diagnose_alone,
    divided_warning,
    placed,
    report,
    suspecting_rank,
    suspicion_of,
    with_uneven,
)
from onstep.training.watchdog.exchange import KNOWING_SECONDS, LEAVING_SECONDS, LINGER_SECONDS, RankExchange
from onstep.training.watchdog.gathers import gather_hint
from onstep.training.watchdog.publication import announcing_end, note_for_launcher, publish, record_failure, say_end
from onstep.training.watchdog.rank_report import RankObserver, RankReport, is_consequence

logger = logging.getLogger(__name__)

Found = TypeVar("Found")

GRACE_SECONDS = 2.0
"""Time that a rank not at fault has, after the report, to end by itself and close its metrics log and trackers."""
FAILING_GRACE_SECONDS = 5.0
"""The same for a rank that has raised, whose callbacks are called with `on_exception`."""
HUNG_GRACE_SECONDS = 0.5
"""The same for the rank that hangs."""
STACKS_SECONDS = 2.0
"""How long the report waits for the stacks of the other ranks."""
REPORT_SECONDS = 6.0
"""How long the other ranks wait for the report."""
_MEETING_SECONDS = 1.0
"""How long a rank waits at the start for a report of rank 0: should that process die before, nobody could name it."""
_END_SECONDS = 0.02
"""How often a rank that has reached the end looks whether all have."""
_LATE_SECONDS = 2.0
"""An observation this late means that this process itself was stopped, as by Ctrl-Z; that time does not count."""
_WORDS: dict[Interruption, str] = {"write": "saving a checkpoint", "score": "evaluating"}


def interval_of(watchdog_seconds: float) -> float:
    """Seconds between two observations: a twentieth of the limit, between 0.1 and 1."""
    return min(1.0, max(0.1, watchdog_seconds / 20))


class Watching(Feature[Run]):
    """Watches the thread that creates it and the other ranks, and keeps track of the process's activity."""

    name = "watchdog"
    when = "ft.watchdog_seconds, unless ft.enable_ft_package"
    collective = True

    @classmethod
    def wanted(cls, host: Run) -> bool:
        return host.cfg.ft.watchdog_seconds is not None and not host.cfg.ft.enable_ft_package

    def __init__(self, host: Run) -> None:
        super().__init__(host)
        world = host.world
        self._seconds = host.cfg.ft.watchdog_seconds or 0.0
        self._interval = interval_of(self._seconds)
        has_peers = world.size > 1 and dist.is_initialized()
        self._me = RankObserver(host, self._seconds, self._interval, has_peers=has_peers)
        self._rank_exchange = RankExchange(world.rank, world.size, self._interval) if has_peers else None
        # torchrun keeps the store of the ranks it starts in its own process
        self._keeps_store = world.is_main and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self._decided_alone = False
        """Whether the decision is of this rank alone, which the others do not read in the store that is lost."""
        self._suspected: Suspicion | None = None
        self._has_news = False
        self._warned: set[str] = set()
        self._first_failure_at: float | None = None
        self._stacks: tuple[int, str] | None = None
        self._thread = threading.Thread(target=announcing_end(self._watch), name="onstep-watchdog", daemon=True)
        self._stopping = threading.Event()
        self._wake = threading.Event()
        self._released = threading.Event()

    @contextmanager
    def session(self) -> Iterator[None]:
        """Watch; if an error ends the run, wait until the first failure is diagnosed."""
        HEARTBEAT.announce(None)
        HEARTBEAT.phase, HEARTBEAT.activity, HEARTBEAT.section, HEARTBEAT.callback = "setup", "setting up", None, None
        if self._rank_exchange is not None:
            self._rank_exchange.record = self._record()
            self._rank_exchange.start()
            self._rank_exchange.has_published.wait(REPORT_SECONDS)  # before any callback can end this process
            self._rank_exchange.has_met.wait(_MEETING_SECONDS)
        self._thread.start()
        try:
            yield
        except SystemExit as leaving:
            self._me.leave(leaving)
            raise
        except BaseException as error:
            refusal = self._wait_for_report(error)
            if refusal:
                raise ConfigError(refusal) from None
            raise
        else:
            self._wait_for_others()
        finally:
            self._end()

    def failing(self, error: BaseException) -> None:
        """Notify the other ranks at once that this one fails; they are still in their collectives.

        They know the error before any callback is called with it, which may end the process.
        """
        exchange = self._rank_exchange
        if exchange is not None and not self._me.has_failed:
            self._me.fail(error)
            exchange.record = self._record()
            exchange.hurry()
            self._wake.set()
            exchange.has_published_failure.wait(GRACE_SECONDS)

    def has_lost_rank(self) -> bool:
        """Whether the process of another rank on this machine is gone; a signal handler may call it."""
        return self._rank_exchange is not None and self._rank_exchange.has_lost_rank()

    def ready(self) -> None:
        HEARTBEAT.beats += 1
        HEARTBEAT.follow(None)
        HEARTBEAT.step = self.host.train_state.step
        HEARTBEAT.activity, HEARTBEAT.phase = "beginning to train", "training"
        self._has_news = True
        self._wake.set()

    def wrap_read(self, read: Callable[[], Found]) -> Callable[[], Found]:
        def watched() -> Found:
            HEARTBEAT.activity = "reading a batch"
            HEARTBEAT.beats += 1
            return read()

        return watched

    def wrap_step(self, train_step: Callable[[Step], None]) -> Callable[[Step], None]:
        def watched(step: Step) -> None:
            HEARTBEAT.activity = "computing a step"
            train_step(step)
            HEARTBEAT.activity = "finishing a step"

        return watched

    def after_count(self, step: Step) -> None:
        HEARTBEAT.step = self.host.train_state.step

    @contextmanager
    def pause(self, work: Interruption) -> Iterator[None]:
        before, HEARTBEAT.activity = HEARTBEAT.activity, _WORDS.get(work, HEARTBEAT.activity)
        try:
            yield
        finally:
            if work == "score":
                HEARTBEAT.activity = before

    def _wait_for_report(self, error: BaseException) -> str:
        """Keep this rank, whose error ends the run, from exiting before the report: its end would end the others.

        Returns:
            What it raises instead, if another rank has refused what it was given; "" for its own error.
        """
        if self._rank_exchange is None:
            return ""
        self.failing(error)
        self._released.wait(REPORT_SECONDS + STACKS_SECONDS + GRACE_SECONDS)
        decision = self._rank_exchange.decision
        if decision is None or decision.rank == self.host.world.rank or decision.kind == "alike":
            return ""
        if decision.refusal and (isinstance(error, ConfigError) or is_consequence(error)):
            return decision.refusal
        error.add_note(f"a consequence of this: {decision.line}")
        return ""

    def _wait_for_others(self) -> None:
        """Keep this rank, which has reached the end, until all have: one that fails there ends the run as failed.

        Raises:
            RankFailedError: naming the rank that has not reached the end.
        """
        exchange = self._rank_exchange
        if exchange is None:
            return
        before, HEARTBEAT.phase, HEARTBEAT.activity = HEARTBEAT.phase, "ended", "waiting for the others at the end"
        self._me.is_done = self._has_news = True
        self._wake.set()
        while not exchange.all_are_done and not self._released.wait(_END_SECONDS):
            exchange.hurry()
        HEARTBEAT.phase = before
        decision = exchange.decision
        if self._released.is_set() and decision is not None:
            self._me.left = 1
            raise RankFailedError(f"the run has ended well on {self.host.world.place()}, but {decision.line}")

    def _end(self) -> None:
        """Notify the other ranks that the run is over on this rank, and stop."""
        if self._me.left is None and not self._me.has_failed:
            self._me.left = 0
        self._stopping.set()
        self._wake.set()
        is_decided = self._rank_exchange is not None and self._rank_exchange.decision is not None
        self._thread.join(REPORT_SECONDS if is_decided else 2 * self._interval + 1)
        if self._rank_exchange is not None:
            self._rank_exchange.record = self._record()
            self._rank_exchange.stop(self._linger_seconds(self._rank_exchange) if self._keeps_store else 0.0)
            if self._rank_exchange.decision is not None and self.host.ending.first_failure is None:
                self._name(self._rank_exchange.decision)
        self._me.close()

    def _linger_seconds(self, exchange: RankExchange) -> float:
        """How long this rank, if it has the store, waits at most for others that read it."""
        if exchange.decision is not None:
            return 0.0 if self._decided_alone else KNOWING_SECONDS
        if self._me.left is None:
            return 0.0
        return LINGER_SECONDS if self._me.left == 0 and self._me.is_done else LEAVING_SECONDS + 2 * self._interval

    def _watch(self) -> None:
        """Observe until the run is over or lost."""
        looked_at = time.monotonic()
        while not self._stopping.is_set():
            late_seconds = time.monotonic() - looked_at - self._interval
            if late_seconds >= _LATE_SECONDS:
                self._me.forgive(late_seconds)
                if self._rank_exchange is not None:
                    self._rank_exchange.forgive(late_seconds)
            looked_at = time.monotonic()
            if self._rank_exchange is None:
                self._diagnose_alone({})
            else:
                self._look_at_all(self._rank_exchange)
            self._wake.wait(0.05 if self._me.has_failed else self._interval)
            self._wake.clear()

    def _record(self) -> RankReport:
        """This rank's record, including its suspicion as the diagnosing rank."""
        record, suspect = self._me.record(), self._suspected
        return record if suspect is None else replace(record, suspects=suspect.rank, suspected_beats=suspect.beats)

    def _look_at_all(self, exchange: RankExchange) -> None:
        record = exchange.record = self._record()
        exchange.is_urgent = record.failure is not None
        if record.failure is not None or self._has_news:
            self._has_news = False
            exchange.hurry()
        if exchange.decision is not None:
            self._carry_out(exchange, exchange.decision)
        elif not self._is_answered(exchange):
            self._diagnose_alone(exchange.rank_reports())
        elif exchange.leader == record.rank and (exchange.knows_all or record.failure is not None):
            self._diagnose(exchange, record.rank)
        else:
            leader = suspecting_rank(record, exchange.rank_reports())
            if leader is not None and not self._me.is_held():
                self._report_self(exchange, record, leader)

    def _is_answered(self, exchange: RankExchange) -> bool:
        """Whether the store still responds."""
        return time.monotonic() - exchange.last_answer < 2 * self._interval + 1

    def _diagnose(self, exchange: RankExchange, own_rank: int) -> None:
        if self._me.is_held():
            return
        rank_reports, now = with_uneven(exchange.rank_reports()), time.monotonic()
        if self._first_failure_at is None and any(one.failure is not None for one in rank_reports.values()):
            self._first_failure_at = now
        since = 0.0 if self._first_failure_at is None else now - self._first_failure_at
        if not exchange.knows_all and since < CONSEQUENCE_SECONDS:
            exchange.hurry()  # a rank that is gone has published that it was there
            return
        diagnosis = diagnose(
            rank_reports,
            interval=self._interval,
            since_first_failure=since,
            stopped_seconds=self._seconds,
            on_cuda=self.host.world.device.type == "cuda",
        )
        self._suspected = suspicion_of(diagnosis, rank_reports, own_rank, self._suspected, now)
        if diagnosis is None:
            self._warn(divided_warning(rank_reports, self.host.world.place))
            return
        if diagnosis.kind == "hung" and diagnosis.rank == own_rank:
            self._report_self(exchange, exchange.record, own_rank)
        elif self._suspected is None or now - self._suspected.at > ANSWER_SECONDS:
            exchange.proposal = decide_on(diagnosis, rank_reports[diagnosis.rank], own_rank, self.host.world.place)
        else:
            exchange.record = self._record()
        exchange.hurry()

    def _warn(self, text: str) -> None:
        """Log a warning, once."""
        if text and text not in self._warned:
            self._warned.add(text)
            logger.warning("%s", text)

    def _report_self(self, exchange: RankExchange, record: RankReport, leader: int) -> None:
        """Report that this rank hangs, with its place and its data workers', unless it has made progress meanwhile."""
        if self._stacks is None or self._stacks[0] != record.beats:
            self._stacks = record.beats, self._own_stacks()
        if HEARTBEAT.beats == record.beats:
            one = placed(with_uneven({**exchange.rank_reports(), record.rank: record})[record.rank], self._stacks[1])
            exchange.proposal = decide_on(FailureDiagnosis("hung", record.rank), one, leader, self.host.world.place)
        exchange.hurry()

    def _diagnose_alone(self, rank_reports: dict[int, RankReport]) -> None:
        """Decide and act without other ranks; see `diagnosis.diagnose_alone`."""
        record = self._record()
        found = diagnose_alone(record, rank_reports, self.host.world.size)
        if found is None or self._me.is_held():
            return
        if found.kind == "left":
            self._decided_alone = True
            self._release_after_exit(found)
            return
        stacks = self._own_stacks() if found.reporter == record.rank else ""
        if record.failure is None and HEARTBEAT.beats != record.beats:
            return
        rank_reports = {**rank_reports, record.rank: placed(record, stacks)}
        place, hint = self.host.world.place, ""
        decision = decide_on(found, rank_reports[found.rank], found.reporter, place)
        self._decided_alone = True
        if self._rank_exchange is not None:
            self._rank_exchange.decision = decision
            hint = "The store of the process group does not respond, so the other ranks' stacks are missing."
        self.host.ending.first_failure = decision.line
        if found.reporter == record.rank:
            self._write(decision, rank_reports, {record.rank: stacks}, hint)
        self._release_and_end(decision)

    def _carry_out(self, exchange: RankExchange, decision: FailureDiagnosis) -> None:
        """Act on the diagnosis: provide the stacks, report if this rank is the reporter, and end.

        Of a refusal, all ranks say the same line instead.
        """
        if decision.kind in ("alike", "left"):  # these ranks raise as they would without a watchdog
            self._release_after_exit(decision)
            return
        self.host.ending.first_failure = decision.line
        exchange.is_urgent = True
        if decision.refusal:
            exchange.hurry()
            if decision.reporter == self.host.world.rank:
                record_failure(self.host, decision)
            self._release_and_end(decision)
            return
        exchange.stacks = self._own_stacks()
        exchange.wants_stacks = decision.reporter == self.host.world.rank
        exchange.hurry()
        if exchange.wants_stacks:
            self._report(exchange, decision)
        deadline = time.monotonic() + REPORT_SECONDS
        while not exchange.is_reported and time.monotonic() < deadline and self._is_answered(exchange):
            time.sleep(0.02)
        self._release_and_end(decision)

    def _release_after_exit(self, decision: FailureDiagnosis) -> None:
        """Let the ranks end by themselves; where one of them has exited, the record of the run names it."""
        if self._rank_exchange is not None:
            self._rank_exchange.decision = decision
            self._rank_exchange.hurry()
        self._name(decision)
        if decision.kind == "left" and decision.reporter == self.host.world.rank:
            record_failure(self.host, decision)
        self._released.set()
        self._stopping.wait()

    def _name(self, decision: FailureDiagnosis) -> None:
        """Have the record of the run, which rank 0 writes at its end, name this, unless all raise the same."""
        if decision.kind != "alike":
            self.host.ending.first_failure = decision.line

    def _report(self, exchange: RankExchange, decision: FailureDiagnosis) -> None:
        rank_reports = exchange.rank_reports()
        answering = {rank for rank, one in rank_reports.items() if one.silence == 0 and one.left is None}
        deadline = time.monotonic() + STACKS_SECONDS
        while not answering <= exchange.collected.keys() and time.monotonic() < deadline:
            time.sleep(0.02)
        stacks = dict(exchange.collected)
        for rank, one in rank_reports.items():
            if rank in stacks or not self._is_here(one) or one.is_over:
                continue
            words = exchange.last_words(rank) if one.is_gone else None
            alive = "" if one.is_stopped or one.is_gone else rank_stacks.dumped_by(one.pid, one.dump_path)
            stacks[rank] = alive if words is None else words.stacks
        self._write(decision, rank_reports, stacks or {self.host.world.rank: self._own_stacks()})
        exchange.report_is_out = True
        exchange.hurry()

    def _is_here(self, one: RankReport) -> bool:
        """Whether a rank runs on this machine, where its process can be inspected and ended."""
        return one.host == self._me.base.host != ""

    def _release_and_end(self, decision: FailureDiagnosis) -> None:
        """Release the main thread, and end the process if it has not exited within its grace period."""
        is_cause = decision.rank == self.host.world.rank
        note_for_launcher(decision, is_cause=is_cause)
        self._released.set()
        grace = FAILING_GRACE_SECONDS if self._me.has_failed else GRACE_SECONDS
        if is_cause and not self._me.has_failed:  # all it can do is let the others see that the report is written
            grace = 0.0 if self._rank_exchange is None else HUNG_GRACE_SECONDS
        if self._stopping.wait(grace):
            return
        self._me.dump.remove()
        if not is_cause:
            say_end(decision)
        rank_stacks.end_own_process()

    def _write(
        self, decision: FailureDiagnosis, rank_reports: dict[int, RankReport], stacks: dict[int, str], hint: str = ""
    ) -> None:
        """Print the report, store it in the run's directory, and record the failure in run.json.

        Ends the processes of this machine that cannot end themselves; a launcher would wait for them for a long time.
        """
        hint = hint or gather_hint(rank_reports, stacks, self.host.world.place)
        publish(self.host, decision, report(decision, rank_reports, stacks, hint, self.host.world.place))
        for one in rank_reports.values():
            if one.silence > 0 and not one.is_over and self._is_here(one):
                rank_stacks.end_process(one.pid, one.birth, one.dump_path)

    def _own_stacks(self) -> str:
        threads = (self._thread.ident, None if self._rank_exchange is None else self._rank_exchange.ident)
        return self._me.stacks({one for one in threads if one is not None})
