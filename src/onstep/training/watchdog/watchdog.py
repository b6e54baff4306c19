"""Ends a run in which a rank hangs, fails or dies: all ranks, within a bound, with one report of who was first.

Each rank has a thread that looks at what the rank is doing (`onstep.heartbeat`), and where there are several ranks a second
one that exchanges it with the others through the process group's store. Nothing of it takes part in the training's
collectives, and the training itself only stores to a few attributes.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from onstep.errors import OnstepError
from onstep.heartbeat import PULSE
from onstep.training.compute.step import Step
from onstep.training.feature import Feature, Interruption
from onstep.training.run import Run
from onstep.training.watchdog import stacks as rank_stacks
from onstep.training.watchdog.diagnosis import (
    ANSWER_SECONDS,
    Accusation,
    Kind,
    Verdict,
    accusation_of,
    accuser_of,
    judge,
    placed,
    report,
    ruling_on,
)
from onstep.training.watchdog.exchange import RankCourier
from onstep.training.watchdog.rank_report import RankObserver, RankRecord

Found = TypeVar("Found")

GRACE_SECONDS = 2.0
"""What a rank that is not to blame has, after the report, to end by itself: to close its journal and its trackers."""
FAILING_GRACE_SECONDS = 5.0
"""The same for a rank that has raised, whose callbacks are told `on_exception`."""
CULPRIT_GRACE_SECONDS = 0.5
"""The same for the rank that hangs."""
STACKS_SECONDS = 2.0
"""How long the report waits for the stacks of the other ranks."""
REPORT_SECONDS = 6.0
"""How long the other ranks wait for the report."""

LINGER_SECONDS = 1.0
"""How long the rank with the store waits for the others to end too: without it they could not say that they have."""

_LATE_SECONDS = 2.0
"""A look that is late by so much: this process itself stood still, as by Ctrl-Z, and that time does not count."""
_WORDS: dict[Interruption, str] = {"write": "saving a checkpoint", "score": "evaluating"}


def interval_of(watchdog_seconds: float) -> float:
    """Seconds between two looks: a twentieth of the limit, between 0.1 and 1."""
    return min(1.0, max(0.1, watchdog_seconds / 20))


class Watching(Feature[Run]):
    """Watches the thread that makes it and the other ranks, and keeps the words of what the process is doing."""

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
        self._courier = RankCourier(world.rank, world.size, self._interval) if has_peers else None
        # torchrun keeps the store of the ranks it starts in its own process
        self._keeps_store = world.is_main and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self._accused: Accusation | None = None
        self._has_news = False
        self._first_failure_at: float | None = None
        self._stacks: tuple[int, str] | None = None
        self._thread = threading.Thread(target=self._watch, name="onstep-watchdog", daemon=True)
        self._stopping = threading.Event()
        self._wake = threading.Event()
        self._released = threading.Event()

    @contextmanager
    def session(self) -> Iterator[None]:
        """Watch; where an error ends the run, wait until the first culprit is known."""
        self.host.ending.first_failure = None
        PULSE.phase, PULSE.doing, PULSE.section, PULSE.told = "setup", "setting up", None, None
        if self._courier is not None:
            self._courier.record = self._record()
            self._courier.start()
        self._thread.start()
        try:
            yield
        except SystemExit as leaving:
            code = leaving.code
            self._me.left = code if isinstance(code, int) else int(code is not None)
            raise
        except BaseException as error:
            self._wait_for_report(error)
            raise
        finally:
            self._end()

    def failing(self, error: BaseException) -> None:
        """Tell the other ranks at once that this one fails; they are still in their collectives."""
        if self._courier is not None and self._me.failed is None:
            self._me.fail(error)
            self._wake.set()

    def ready(self) -> None:
        PULSE.beats += 1
        PULSE.doing, PULSE.phase = "beginning to train", "training"
        self._has_news = True
        self._wake.set()

    def wrap_read(self, read: Callable[[], Found]) -> Callable[[], Found]:
        def watched() -> Found:
            PULSE.doing = "reading a batch"
            PULSE.beats += 1
            return read()

        return watched

    def wrap_step(self, train_step: Callable[[Step], None]) -> Callable[[Step], None]:
        def watched(step: Step) -> None:
            PULSE.doing = "computing a step"
            train_step(step)
            PULSE.doing = "finishing a step"

        return watched

    @contextmanager
    def pause(self, work: Interruption) -> Iterator[None]:
        before, PULSE.doing = PULSE.doing, _WORDS.get(work, PULSE.doing)
        try:
            yield
        finally:
            if work == "score":
                PULSE.doing = before

    def _wait_for_report(self, error: BaseException) -> None:
        """Keep this rank, whose error ends the run, from leaving before the report is out; its end ends the others."""
        if self._courier is None:
            return
        self.failing(error)
        self._released.wait(REPORT_SECONDS + STACKS_SECONDS + GRACE_SECONDS)
        ruling = self._courier.ruling
        if ruling is not None and ruling.rank != self.host.world.rank and ruling.kind not in ("alike", "left"):
            error.add_note(f"a consequence of this: {ruling.line}")

    def _end(self) -> None:
        """The run is over on this rank: tell the others, and stop."""
        if self._me.left is None and self._me.failed is None:
            self._me.left = 0
        self._stopping.set()
        self._wake.set()
        has_ruling = self._courier is not None and self._courier.ruling is not None
        self._thread.join(REPORT_SECONDS if has_ruling else 2 * self._interval + 1)
        if self._courier is not None:
            self._courier.record = self._record()
            self._courier.stop(LINGER_SECONDS if self._me.left == 0 and self._keeps_store else 0.0)
        self._me.close()

    def _watch(self) -> None:
        """Look, until the run is over or lost."""
        looked_at = time.monotonic()
        while not self._stopping.is_set():
            late_seconds = time.monotonic() - looked_at - self._interval
            if late_seconds >= _LATE_SECONDS:
                self._me.forgive(late_seconds)
                if self._courier is not None:
                    self._courier.forgive(late_seconds)
            looked_at = time.monotonic()
            if self._courier is None:
                self._judge_alone({})
            else:
                self._look_at_all(self._courier)
            self._wake.wait(self._interval if self._me.failed is None else 0.05)
            self._wake.clear()

    def _record(self) -> RankRecord:
        """This rank, with whom it accuses as the judge."""
        record, accused = self._me.record(), self._accused
        return record if accused is None else replace(record, accuses=accused.rank, accused_beats=accused.beats)

    def _look_at_all(self, courier: RankCourier) -> None:
        record = courier.record = self._record()
        courier.is_urgent = record.failure is not None
        if record.failure is not None or self._has_news:
            self._has_news = False
            courier.hurry()
        if courier.ruling is not None:
            self._carry_out(courier, courier.ruling)
        elif not self._is_answered(courier):
            self._judge_alone(courier.witnesses())
        elif courier.leader == record.rank and (courier.knows_all or record.failure is not None):
            self._judge(courier, record.rank)
        else:
            judge_rank = accuser_of(record, courier.witnesses())
            if judge_rank is not None and not self._me.is_held():
                self._confess(courier, record, judge_rank)

    def _is_answered(self, courier: RankCourier) -> bool:
        """Whether the store still answers."""
        return time.monotonic() - courier.last_answer < 2 * self._interval + 1

    def _judge(self, courier: RankCourier, own_rank: int) -> None:
        if self._me.is_held():
            return
        witnesses, now = courier.witnesses(), time.monotonic()
        if self._first_failure_at is None and any(one.failure is not None for one in witnesses.values()):
            self._first_failure_at = now
        verdict = judge(
            witnesses,
            interval=self._interval,
            since_first_failure=0.0 if self._first_failure_at is None else now - self._first_failure_at,
            stopped_seconds=self._seconds,
            on_cuda=self.host.world.device.type == "cuda",
        )
        self._accused = accusation_of(verdict, witnesses, own_rank, self._accused, now)
        if verdict is None:
            return
        if verdict.kind == "hung" and verdict.rank == own_rank:
            self._confess(courier, courier.record, own_rank)
        elif self._accused is None or now - self._accused.at > ANSWER_SECONDS:
            courier.proposal = ruling_on(verdict, witnesses[verdict.rank], own_rank)
        else:
            courier.record = self._record()
        courier.hurry()

    def _confess(self, courier: RankCourier, record: RankRecord, judge_rank: int) -> None:
        """Say that this rank hangs, which knows its place and its data workers', unless it has moved meanwhile."""
        if self._stacks is None or self._stacks[0] != record.beats:
            self._stacks = record.beats, self._own_stacks()
        if PULSE.beats == record.beats:
            one = placed(record, self._stacks[1])
            courier.proposal = ruling_on(Verdict("hung", record.rank), one, judge_rank)
        courier.hurry()

    def _judge_alone(self, witnesses: dict[int, RankRecord]) -> None:
        """Decide without other ranks: there are none, or the store lived in a process that is gone or stopped.

        As long as this rank gets on, nothing is wrong: rank 0 may simply have ended before it. Each rank decides for
        itself, and one of them speaks.
        """
        record = self._record()
        if (record.failure is None and not record.is_stalled) or self._me.is_held():
            return
        is_victim = record.is_waiting if record.failure is None else record.failure.is_consequence
        first = witnesses.get(0)
        rank = 0 if is_victim and first is not None and not first.is_over else record.rank
        speakers = [one for one in range(1, self.host.world.size) if one != rank]
        reporter = speakers[0] if speakers and is_victim else record.rank
        stacks = self._own_stacks() if reporter == record.rank else ""
        if record.failure is None and PULSE.beats != record.beats:
            return
        witnesses = {**witnesses, record.rank: placed(record, stacks)}
        kind: Kind = "hung" if witnesses[rank].is_stopped else "died"
        if rank == record.rank:
            kind = "hung" if record.failure is None else "raised"
        ruling, hint = ruling_on(Verdict(kind, rank), witnesses[rank], reporter), ""
        if self._courier is not None:
            self._courier.ruling = ruling
            hint = "The store of the process group does not answer, so the other ranks' stacks are not here."
        self.host.ending.first_failure = ruling.line
        if reporter == record.rank:
            self._write(ruling, witnesses, {record.rank: stacks}, hint)
        self._release_and_end(is_culprit=rank == record.rank)

    def _carry_out(self, courier: RankCourier, ruling: Verdict) -> None:
        """Act on what was decided: give the stacks, report if this rank is to, and end."""
        if ruling.kind in ("alike", "left"):  # they raise as they would without a watchdog
            self._released.set()
            self._stopping.wait()
            return
        self.host.ending.first_failure = ruling.line
        courier.is_urgent = True
        courier.stacks = self._own_stacks()
        courier.wants_stacks = ruling.reporter == self.host.world.rank
        courier.hurry()
        if courier.wants_stacks:
            self._report(courier, ruling)
        deadline = time.monotonic() + REPORT_SECONDS
        while not courier.is_reported and time.monotonic() < deadline and self._is_answered(courier):
            time.sleep(0.02)
        self._release_and_end(is_culprit=ruling.rank == self.host.world.rank)

    def _report(self, courier: RankCourier, ruling: Verdict) -> None:
        witnesses = courier.witnesses()
        answering = {rank for rank, one in witnesses.items() if one.silence == 0 and one.left is None}
        deadline = time.monotonic() + STACKS_SECONDS
        while not answering <= courier.collected.keys() and time.monotonic() < deadline:
            time.sleep(0.02)
        stacks = dict(courier.collected)
        for rank, one in witnesses.items():
            if rank not in stacks and self._is_here(one) and not one.is_gone:
                stacks[rank] = "" if one.is_stopped else rank_stacks.dumped_by(one.pid, one.dump_path)
        self._write(ruling, witnesses, stacks or {self.host.world.rank: self._own_stacks()})
        courier.report_is_out = True
        courier.hurry()

    def _is_here(self, one: RankRecord) -> bool:
        """Whether a rank runs on this machine, where its process can be asked and ended."""
        return one.host == self._me.base.host != ""

    def _release_and_end(self, *, is_culprit: bool) -> None:
        """Let the main thread go, and end the process if it has not gone within its grace."""
        self._released.set()
        grace = GRACE_SECONDS if self._me.failed is None else FAILING_GRACE_SECONDS
        if is_culprit and self._me.failed is None:  # it can do no more than let the others see that the report is out
            grace = 0.0 if self._courier is None else CULPRIT_GRACE_SECONDS
        if self._stopping.wait(grace):
            return
        for child in multiprocessing.active_children():  # data workers that stand still would not notice
            with suppress(OSError, ValueError):
                child.kill()
        self._me.dump.remove()
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(1)

    def _write(self, ruling: Verdict, witnesses: dict[int, RankRecord], stacks: dict[int, str], hint: str = "") -> None:
        """Print the report, keep it in the run's folder, and say in run.json that the run has failed.

        Ends the processes of this machine that cannot end themselves; a launcher would wait long for them.
        """
        text = report(ruling, witnesses, stacks, hint)
        with suppress(OSError):
            os.write(2, text.encode())
        folder = self.host.run_folder
        if folder is not None:
            name = f"first-culprit-{datetime.now():%Y-%m-%dT%H-%M-%S}.txt"
            with suppress(OSError, OnstepError):
                Path(folder.path, name).write_text(text, encoding="utf-8")
                folder.finish("failed", self.host.train_state.step, ruling.line)
        for one in witnesses.values():
            if one.silence > 0 and not one.is_over and self._is_here(one):
                rank_stacks.end_process(one.pid, one.birth)

    def _own_stacks(self) -> str:
        threads = (self._thread.ident, None if self._courier is None else self._courier.ident)
        return self._me.stacks({one for one in threads if one is not None})
