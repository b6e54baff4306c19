"""Ends a run in which a rank hangs, fails or dies: all ranks, within a bound, with one report of who was first.

Each rank has a thread that looks at what the rank is doing (`onstep.pulse`), and where there are several ranks a second
one that exchanges it with the others through the process group's store. Nothing of it takes part in the training's
collectives, and the training itself only stores to a few attributes.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch.distributed as dist

from onstep.errors import OnstepError
from onstep.pulse import PULSE
from onstep.training import rank_stacks
from onstep.training.accusations import ANSWER_SECONDS, Accusation, accusation_of, accuser_of
from onstep.training.feature import Feature, Interruption
from onstep.training.first_culprit import Kind, Verdict, Witness, first_line, judge, report, worker_frame
from onstep.training.host_processes import birth_of, end_process, this_host
from onstep.training.interrupts import Interrupts
from onstep.training.rank_courier import RankCourier, Ruling
from onstep.training.rank_record import Failure, RankRecord
from onstep.training.run import Run
from onstep.training.step import Step

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

_LOST = ("onnection", "roken pipe", "imed out", "NCCL", "gloo", "ocket", "peer")
_LOOKED_AT_SECONDS = 0.5
"""A rank that has stood still for so long looks at its own stack, to tell where it stands."""

_LATE_SECONDS = 2.0


def interval_of(watchdog_seconds: float) -> float:
    """Seconds between two looks: a twentieth of the limit, between 0.1 and 1."""
    return min(1.0, max(0.1, watchdog_seconds / 20))


class Watchdog(threading.Thread):
    """Watches the thread that makes it, and with it the other ranks of its run.

    Args:
        state: of the run.
        seconds: limit of standing still, outside of the set-up.
    """

    def __init__(self, state: Run, seconds: float) -> None:
        super().__init__(name="onstep-watchdog", daemon=True)
        self.state = state
        self.seconds = seconds
        self.interval = interval_of(seconds)
        self._watched = threading.get_ident()
        self._pid = os.getpid()
        self._base = RankRecord(
            state.world.rank, pid=self._pid, birth=birth_of(self._pid), host=this_host(), is_debugged=_is_traced()
        )
        self._dump = rank_stacks.StackDump(is_alone=not _has_peers(state))
        self._base.dump_path = self._dump.path
        self._courier = RankCourier(state.world.rank, state.world.size, self.interval) if _has_peers(state) else None
        # torchrun keeps the store of the ranks it starts in its own process
        self._keeps_store = state.world.is_main and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self._beats = -1
        self._beat_at = time.monotonic()
        self._limit_before: float | None = None
        self._accused: Accusation | None = None
        self._has_news = False
        self._interrupts = Interrupts() if self._courier is not None else None
        self._failure: Failure | None = None
        self._failed_record: RankRecord | None = None
        self._failed_at: float | None = None
        self._left: int | None = None
        self._stacks: tuple[int, str] | None = None
        self._stopping = threading.Event()
        self._wake = threading.Event()
        self._released = threading.Event()

    def begin(self) -> None:
        """Start the threads."""
        PULSE.phase, PULSE.doing, PULSE.section, PULSE.told = "setup", "setting up", None, None
        if self._courier is not None:
            self._courier.record = self._record()
            self._courier.start()
        self.start()

    def end(self) -> None:
        """The run is over on this rank: tell the others, and stop."""
        if self._left is None and self._failure is None:
            self._left = 0
        self._stopping.set()
        self._wake.set()
        has_ruling = self._courier is not None and self._courier.ruling is not None
        self.join(REPORT_SECONDS if has_ruling else 2 * self.interval + 1)
        if self._courier is not None:
            self._courier.record = self._record()
            self._courier.stop(LINGER_SECONDS if self._left == 0 and self._keeps_store else 0.0)
        if self._interrupts is not None:
            self._interrupts.close()
        self._dump.close()

    def look_now(self) -> None:
        """Look and publish at once: something has begun that the others should know of."""
        self._has_news = True
        self._wake.set()

    def leave(self, code: object) -> None:
        """This rank leaves by a decision, not by an error."""
        self._left = code if isinstance(code, int) else int(code is not None)

    def publish(self, error: BaseException) -> None:
        """Tell the other ranks at once that this one fails; they are still in their collectives."""
        if self._courier is None or self._failure is not None or isinstance(error, SystemExit):
            return
        text = "".join(traceback.format_exception(error))
        event, callback = rank_stacks.told_of(error)
        self._failed_record = replace(
            self._record(), event=event, callback=callback, place=rank_stacks.place_of_error(error), idle_seconds=0.0
        )
        self._failure = Failure(0, type(error).__name__, str(error), text, is_consequence(error))
        self._wake.set()

    def wait_for_report(self, error: BaseException) -> None:
        """Keep this rank, whose error ends the run, from leaving before the report is out; its end ends the others."""
        if self._courier is None or isinstance(error, SystemExit):
            return
        self.publish(error)
        self._released.wait(REPORT_SECONDS + STACKS_SECONDS + GRACE_SECONDS)
        ruling = self._courier.ruling
        if ruling is not None and ruling.rank != self.state.world.rank and ruling.kind not in ("alike", "left"):
            error.add_note(f"a consequence of this: {ruling.line}")

    def run(self) -> None:
        """Look, until the run is over or lost."""
        looked_at = time.monotonic()
        while not self._stopping.is_set():
            self._forgive(time.monotonic() - looked_at - self.interval)
            looked_at = time.monotonic()
            if self._courier is None:
                self._look_alone()
            else:
                self._look_at_all(self._courier)
            is_urgent = self._failure is not None
            self._wake.wait(0.05 if is_urgent else self.interval)
            self._wake.clear()

    def _forgive(self, late_seconds: float) -> None:
        """Do not count time in which this process itself stood still, as by Ctrl-Z or on a machine that was asleep."""
        if late_seconds < _LATE_SECONDS:
            return
        self._beat_at += late_seconds
        if self._courier is not None:
            self._courier.forgive(late_seconds)

    def _look_alone(self) -> None:
        record = self._record()
        verdict = judge({0: Witness(record)}, interval=self.interval)
        if verdict is not None and not self._is_held():
            stacks = self._own_stacks()
            if PULSE.beats != record.beats:
                return
            line = first_line(verdict, Witness(_placed(record, stacks)))
            self._write(verdict, line, {record.rank: Witness(record)}, {record.rank: stacks})
            self._exit()

    def _look_at_all(self, courier: RankCourier) -> None:
        record = courier.record = self._record()
        courier.is_urgent = record.failure is not None
        if record.failure is not None or self._has_news:
            self._has_news = False
            courier.hurry()
        if courier.ruling is not None:
            self._carry_out(courier, courier.ruling)
            return
        if not self._is_answered(courier):
            self._judge_without_store(courier)
        elif courier.leader == self.state.world.rank and (courier.knows_all or record.failure is not None):
            self._judge(courier)
        else:
            self._look_at_accusation(courier, record)

    def _is_answered(self, courier: RankCourier) -> bool:
        """Whether the store still answers."""
        return time.monotonic() - courier.last_answer < 2 * self.interval + 1

    def _judge(self, courier: RankCourier) -> None:
        if self._is_held():
            return
        witnesses = courier.witnesses()
        has_failed = any(one.record.failure is not None for one in witnesses.values())
        if has_failed and self._failed_at is None:
            self._failed_at = time.monotonic()
        verdict = judge(
            witnesses,
            interval=self.interval,
            since_first_failure=0.0 if self._failed_at is None else time.monotonic() - self._failed_at,
            stopped_seconds=self.seconds,
            on_cuda=self.state.world.device.type == "cuda",
        )
        self._accused = accusation_of(verdict, witnesses, self.state.world.rank, self._accused, time.monotonic())
        if verdict is None:
            return
        if verdict.kind == "hung" and verdict.rank == self.state.world.rank:
            self._confess(courier, courier.record, self.state.world.rank)
        elif self._accused is None or time.monotonic() - self._accused.at > ANSWER_SECONDS:
            line = first_line(verdict, witnesses[verdict.rank])
            courier.proposal = Ruling(verdict.kind, verdict.rank, line, self.state.world.rank)
        else:
            courier.record = self._record()
        courier.hurry()

    def _look_at_accusation(self, courier: RankCourier, record: RankRecord) -> None:
        """Say that this rank hangs, where the judge has found so and it has not moved since."""
        judge_rank = accuser_of(record, courier.witnesses())
        if judge_rank is not None and not self._is_held():
            self._confess(courier, record, judge_rank)
            courier.hurry()

    def _confess(self, courier: RankCourier, record: RankRecord, judge_rank: int) -> None:
        """Make the verdict on this rank itself, which knows its place and its data workers'."""
        if self._stacks is None or self._stacks[0] != record.beats:
            self._stacks = record.beats, self._own_stacks()
        if PULSE.beats == record.beats:
            line = first_line(Verdict("hung", record.rank), Witness(_placed(record, self._stacks[1])))
            courier.proposal = Ruling("hung", record.rank, line, judge_rank)

    def _judge_without_store(self, courier: RankCourier) -> None:
        """The store lived in a process that is gone or stopped: each rank decides for itself, and one of them speaks.

        As long as this rank gets on, nothing is wrong: rank 0 may simply have ended before it.
        """
        record = self._record()
        is_stalled = record.limit_seconds is not None and record.idle_seconds >= record.limit_seconds
        if (record.failure is None and not is_stalled) or self._is_held():
            return
        witnesses = courier.witnesses()
        is_victim = record.is_waiting if record.failure is None else record.failure.is_consequence
        rank = 0 if is_victim and 0 in witnesses and not witnesses[0].is_over else record.rank
        kind: Kind = "hung" if witnesses[rank].is_stopped or rank == record.rank else "died"
        if rank == record.rank and record.failure is not None:
            kind = "raised"
        verdict = Verdict(kind, rank)
        line = first_line(verdict, witnesses[rank])
        speakers = [one for one in range(1, self.state.world.size) if one != rank]
        ruling = Ruling(verdict.kind, rank, line, speakers[0] if speakers and is_victim else record.rank)
        courier.ruling = ruling
        self.state.ending.first_failure = line
        if ruling.reporter == record.rank:
            left_out = "The store of the process group does not answer, so the other ranks' stacks are not here."
            self._write(verdict, line, witnesses, {record.rank: self._own_stacks()}, left_out)
            self._end_silent(witnesses)
        self._release_and_end(is_culprit=rank == record.rank)

    def _carry_out(self, courier: RankCourier, ruling: Ruling) -> None:
        """Act on what was decided: give the stacks, report if this rank is to, and end."""
        if ruling.kind in ("alike", "left"):  # they raise as they would without a watchdog
            self._released.set()
            self._stopping.wait()
            return
        self.state.ending.first_failure = ruling.line
        courier.is_urgent = True
        courier.stacks = self._own_stacks()
        courier.wants_stacks = ruling.reporter == self.state.world.rank
        courier.hurry()
        if courier.wants_stacks:
            self._report(courier, ruling)
        deadline = time.monotonic() + REPORT_SECONDS
        while not courier.is_reported and time.monotonic() < deadline and self._is_answered(courier):
            time.sleep(0.02)
        self._release_and_end(is_culprit=ruling.rank == self.state.world.rank)

    def _report(self, courier: RankCourier, ruling: Ruling) -> None:
        witnesses = courier.witnesses()
        answering = {rank for rank, one in witnesses.items() if one.silence == 0 and one.record.left is None}
        deadline = time.monotonic() + STACKS_SECONDS
        while not answering <= courier.collected.keys() and time.monotonic() < deadline:
            time.sleep(0.02)
        stacks = dict(courier.collected)
        for rank, one in witnesses.items():
            if rank not in stacks and one.record.host == self._base.host != "" and not one.is_gone:
                stacks[rank] = "" if one.is_stopped else rank_stacks.dumped_by(one.record.pid, one.record.dump_path)
        self._write(Verdict(ruling.kind, ruling.rank), ruling.line, witnesses, stacks)
        self._end_silent(witnesses)
        courier.report_is_out = True
        courier.hurry()

    def _end_silent(self, witnesses: dict[int, Witness]) -> None:
        """End the processes of this machine that cannot end themselves; a launcher would wait long for them."""
        for one in witnesses.values():
            if one.silence > 0 and not one.is_over and one.record.host == self._base.host != "":
                end_process(one.record.pid, one.record.birth)

    def _release_and_end(self, *, is_culprit: bool) -> None:
        """Let the main thread go, and end the process if it has not gone within its grace."""
        self._released.set()
        grace = FAILING_GRACE_SECONDS if self._failure is not None else GRACE_SECONDS
        if is_culprit and self._failure is None:  # it can do no more than let the others see that the report is out
            grace = CULPRIT_GRACE_SECONDS
        if not self._stopping.wait(grace):
            self._exit()

    def _exit(self) -> None:
        rank_stacks.end_children()
        self._dump.remove()
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(1)

    def _write(
        self,
        verdict: Verdict,
        line: str,
        witnesses: dict[int, Witness],
        stacks: dict[int, str],
        hint: str = "",
    ) -> None:
        """Print the report, keep it in the run's folder, and say in run.json that the run has failed."""
        stacks = stacks or {self._base.rank: self._own_stacks()}
        text = report(verdict, line, witnesses, stacks, hint)
        with suppress(OSError):
            os.write(2, text.encode())
        folder = self.state.run_folder
        if folder is None:
            return
        name = f"first-culprit-{datetime.now():%Y-%m-%dT%H-%M-%S}.txt"
        with suppress(OSError, OnstepError):
            Path(folder.path, name).write_text(text, encoding="utf-8")
            folder.finish("failed", self.state.train_state.step, line)

    def _own_stacks(self) -> str:
        threads = {self.ident or 0, (self._courier.ident if self._courier is not None else 0) or 0}
        return rank_stacks.stacks_of_threads(threads) + "\n" + self._dump.stacks_of_workers()

    def _record(self) -> RankRecord:
        """This rank at this moment, or at that of its failure."""
        if self._failed_record is not None and self._failure is not None:
            return replace(self._failed_record, failure=self._failure, left=self._left)
        now, told, beats = time.monotonic(), PULSE.told, PULSE.beats
        limit = self._limit(told)
        if beats != self._beats or limit != self._limit_before:  # time under another limit, or none, does not count
            self._beats, self._beat_at, self._limit_before = beats, now, limit
        idle, accused = now - self._beat_at, self._accused
        frame = rank_stacks.frame_of(self._watched) if idle >= _LOOKED_AT_SECONDS else None
        self._dump.renew(None if limit is None or self._base.is_debugged else limit + 3 * self.interval + 4)
        return replace(
            self._base,
            step=self.state.train_state.step,
            phase=PULSE.phase,
            doing=PULSE.doing,
            event=None if told is None else told[0],
            callback=None if told is None else told[1],
            place=rank_stacks.place_of(frame),
            beats=beats,
            idle_seconds=idle,
            limit_seconds=limit,
            collectives=_collectives() if self._courier is not None else 0,
            is_waiting=self._courier is not None and rank_stacks.waits_in_collective(frame),
            waits_for_worker=rank_stacks.waits_for_worker(frame),
            is_debugged=self._base.is_debugged or rank_stacks.is_in_debugger(frame),
            is_interrupted=self._interrupts is not None and self._interrupts.look(),
            accuses=None if accused is None else accused.rank,
            accused_beats=0 if accused is None else accused.beats,
            left=self._left,
            failure=self._failure,
        )

    def _limit(self, told: tuple[str, str] | None) -> float | None:
        """Seconds that this rank may stand still where it is; None in the set-up, but for its callbacks."""
        is_watched = PULSE.phase != "setup" or told is not None
        section = PULSE.section or ("out_of_section" if is_watched else None)
        return self.state.stage.section_limits.get(section or "", self.seconds if is_watched else None)

    def _is_held(self) -> bool:
        """Whether a debugger may be what makes this rank stand still."""
        return self._base.is_debugged or rank_stacks.is_in_debugger(rank_stacks.frame_of(self._watched))


class Watching(Feature[Run]):
    """Watches this rank and the others, and keeps the watchdog's words of what the process is doing."""

    name = "watchdog"
    when = "ft.watchdog_seconds, unless ft.enable_ft_package"
    collective = True

    @classmethod
    def wanted(cls, host: Run) -> bool:
        return host.cfg.ft.watchdog_seconds is not None and not host.cfg.ft.enable_ft_package

    def __init__(self, host: Run) -> None:
        super().__init__(host)
        self.dog = Watchdog(host, host.cfg.ft.watchdog_seconds or 0.0)

    @contextmanager
    def session(self) -> Iterator[None]:
        """Watch; where an error ends the run, wait until the first culprit is known."""
        dog = self.dog
        self.host.ending.first_failure = None
        dog.begin()
        try:
            yield
        except SystemExit as leaving:
            dog.leave(leaving.code)
            raise
        except BaseException as error:
            dog.wait_for_report(error)
            raise
        finally:
            dog.end()

    def failing(self, error: BaseException) -> None:
        self.dog.publish(error)

    def ready(self) -> None:
        PULSE.beats += 1
        PULSE.doing, PULSE.phase = "beginning to train", "training"
        self.dog.look_now()

    def wrap_read(self, read: Callable[..., Any]) -> Callable[..., Any]:
        """The words of reading."""

        def watched() -> Any:
            PULSE.doing = "reading a batch"
            PULSE.beats += 1
            return read()

        return watched

    def wrap_step(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        """The words of a step."""

        def watched(step: Step) -> None:
            PULSE.doing = "computing a step"
            train_step(step)
            PULSE.doing = "finishing a step"

        return watched

    @contextmanager
    def pause(self, work: Interruption) -> Iterator[None]:
        if work == "write":
            PULSE.doing = "saving a checkpoint"
        if work != "score":
            yield
            return
        before, PULSE.doing = PULSE.doing, "evaluating"
        try:
            yield
        finally:
            PULSE.doing = before


def is_consequence(error: BaseException) -> bool:
    """Whether an error only tells that a connection to another rank is lost."""
    if not isinstance(error, (RuntimeError, dist.DistError)):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    inner = frames[-1].filename if frames else ""
    is_inside = any(part in inner for part in ("/torch/distributed/", "/torch/autograd/", "/torch/nn/parallel/"))
    return is_inside and any(word in str(error) for word in _LOST)


def _placed(record: RankRecord, stacks: str) -> RankRecord:
    """The record with the line that reads the dataset, where the rank waits for a data worker."""
    worker = worker_frame(stacks) if record.waits_for_worker else None
    return record if worker is None else replace(record, place=worker[1])


def _has_peers(state: Run) -> bool:
    return state.world.size > 1 and dist.is_initialized()


def _is_traced() -> bool:
    """Whether a debugger, or another tracer, steps through this thread."""
    return sys.gettrace() is not None


def _collectives() -> int:
    """Collectives that this rank has entered, over all process groups that it belongs to."""
    groups: Any = dist.distributed_c10d._world.pg_map
    return sum(int(group._get_sequence_number_for_group()) for group in list(groups))
