"""A run that is killed again and again at random instants until it has completed, and the uninterrupted one."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.faults.kill_marks import VARIABLE, Marks, Phase
from tests.support.faults.kill_server import Life, Server, Start

NAME = "storm"
SHARES = {Phase.START_UP: 0.18, Phase.SAVE: 0.34, Phase.EVALUATION: 0.2, Phase.STEP: 0.28}
"""How many kills aim at each phase; a STEP is any instant after the first step."""
DELAYS = {Phase.SAVE: 0.03, Phase.EVALUATION: 0.015, Phase.STEP: 0.3, Phase.END: 0.06}
"""Longest delay between the moment aimed at and the kill, in seconds."""


@dataclass(frozen=True)
class Job:
    """A run of `onstep train`."""

    directory: Path
    """The working directory; the run is in `runs/storm` below it, so that both runs have the same configuration."""
    words: tuple[str, ...]
    steps: int
    ranks: int = 1

    @property
    def run(self) -> Path:
        """The run's directory."""
        return self.directory / "runs" / NAME

    @property
    def log(self) -> Path:
        """What all lives of the run have printed."""
        return self.directory / "output.txt"

    def start(self) -> Start:
        """What a life is started with."""
        self.directory.mkdir(parents=True, exist_ok=True)
        imports = ["--import", str(Path(__file__).with_name("kill_callbacks.py"))]
        own = ["callbacks=[kill_callbacks:ShowWhere, kill_callbacks:Remembers]", f"run.name={NAME}"]
        return Start(
            ["train", *imports, *own, f"train.train_iters={self.steps}", *self.words],
            self.ranks,
            str(self.directory),
            str(self.log),
            {VARIABLE: str(self.directory / "marks")},
        )

    def complete(self, server: Server, is_fresh: bool = True) -> None:
        """Run to the end without a kill."""
        life = server.fresh(self.start()) if is_fresh else server.fork(self.start())
        code = life.wait(300)
        assert code == 0, self.log.read_text()[-4000:]


@dataclass(frozen=True)
class Kill:
    """One SIGKILL, and where it fell."""

    phase: Phase
    step: int
    victim: str
    left_debris: bool
    """Whether it left a half-written save behind."""
    is_fresh: bool
    """Whether the process had started from nothing, not from a fork."""


@dataclass
class Storm:
    """Kills a job `num_kills` times."""

    job: Job
    server: Server
    num_kills: int
    seed: int
    phases: list[Phase] = field(default_factory=list)
    """What the first kills aim at; the others are drawn from `SHARES`."""
    fresh_share: float = 0.1
    """How many starts are fresh processes."""
    end_kills: int = 2
    """How many of the kills, the last ones, aim at what follows the training."""
    kills: list[Kill] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._start_up_seconds = {True: 3.0, False: 0.2}

    def rage(self) -> list[Kill]:
        """Kill, start again, kill, ... and at last let the run complete."""
        start = self.job.start()
        self._marks = Marks(Path(start.environment[VARIABLE]))
        while len(self.kills) < self.num_kills:
            aim, is_fresh = self._next_aim(), self._random.random() < self.fresh_share
            self._marks.clear()
            life = self.server.fresh(start) if is_fresh else self.server.fork(start)
            if not self._kill_at(life, aim, is_fresh):
                break
        if not self.codes or self.codes[-1] != 0:
            self._marks.clear()  # Else the last life waits where the killed one was held.
            self.codes.append(self.server.fork(start).wait(300))
        assert self.codes[-1] == 0, self.job.log.read_text()[-4000:]
        return self.kills

    def _next_aim(self) -> Phase:
        number = len(self.kills)
        if number >= self.num_kills - self.end_kills:
            return Phase.END
        if number < len(self.phases):
            return self.phases[number]
        return self._random.choices(list(SHARES), list(SHARES.values()))[0]

    def _kill_at(self, life: Life, aim: Phase, is_fresh: bool) -> bool:
        """Wait for the moment, kill and see where it fell; False if the run was done before."""
        rank = self._random.randrange(self.job.ranks)
        self._wait_for(life, aim, rank, is_fresh)
        spares = self._random.random() < 0.5
        if life.is_over:
            self.codes.append(life.wait())
            assert self.codes[-1] == 0, self.job.log.read_text()[-4000:]
            return False
        life.kill_one(rank) if spares else life.kill_all()
        self.codes.append(life.wait())
        self.kills.append(
            Kill(
                self._marks.phase(rank),
                self._marks.step(rank),
                (f"rank {rank}" if self.job.ranks > 1 else "process") if spares else "all",
                any((self.job.run / "checkpoints").glob(".tmp-checkpoint-*/*")),
                is_fresh,
            )
        )
        return True

    def _wait_for(self, life: Life, aim: Phase, rank: int, is_fresh: bool) -> None:
        started = time.monotonic()
        if aim == Phase.START_UP:
            self._pause(life, self._random.uniform(0, 0.8 * self._start_up_seconds[is_fresh]))
            return
        occurrence, before, delay = (
            self._occurrence(aim),
            Phase.START_UP,
            DELAYS[aim] * (0.3 if self._is_ahead else 1.0),
        )
        while not life.is_over:
            now = self._marks.phase(rank)
            if before == Phase.START_UP and now != before:
                self._start_up_seconds[is_fresh] = time.monotonic() - started
            occurrence -= now != before and now == aim
            before = now
            if aim in (Phase.SAVE, Phase.EVALUATION):
                self._marks.hold_at(rank, None if now == aim and occurrence > 0 else aim)
            if occurrence <= 0 and now == aim:
                if delay > 0:
                    self._marks.hold_at(rank, None)
                    self._pause(life, self._random.uniform(0, delay))
                if aim in (Phase.STEP, Phase.END) or self._has_caught(life, rank, aim):
                    return
                before, occurrence, delay = self._marks.phase(rank), 1, 0.0
            time.sleep(0.0003)

    def _has_caught(self, life: Life, rank: int, aim: Phase) -> bool:
        """Hold the rank; let it go on if the delay was longer than the phase."""
        life.hold(rank)
        if self._marks.phase(rank) == aim:
            return True
        life.let_go(rank)
        return False

    def _occurrence(self, aim: Phase) -> int:
        """At which one of a life to kill: the first where the run is ahead, so that it does not outrun the storm."""
        if aim not in (Phase.SAVE, Phase.EVALUATION) or len(self.kills) < len(self.phases):
            return 1
        return 1 if self._is_ahead else self._random.randint(1, 3)

    @property
    def _is_ahead(self) -> bool:
        done = max((kill.step for kill in self.kills), default=0)
        return done / self.job.steps > len(self.kills) / self.num_kills

    def _pause(self, life: Life, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not life.is_over:
            time.sleep(0.0003)


def histogram(kills: Iterable[Kill]) -> str:
    """Where the kills fell, one line a phase."""
    kills = list(kills)
    counts = Counter(one.phase for one in kills)
    names = {
        Phase.START_UP: "start-up before training",
        Phase.STEP: "in a step",
        Phase.SAVE: "inside a save",
        Phase.EVALUATION: "inside an evaluation",
        Phase.END: "after the training",
    }
    lines = [f"{names[phase]:<26}{counts[phase]:>4}  {'#' * counts[phase]}" for phase in Phase]
    victims = Counter(one.victim for one in kills)
    notified = ", ".join(f"{victim} {number}" for victim, number in sorted(victims.items()))
    debris, fresh = sum(one.left_debris for one in kills), sum(one.is_fresh for one in kills)
    lines.append(
        f"{len(kills)} kills ({notified}); {debris} left a half-written save; {fresh} in processes started fresh"
    )
    return "\n".join(lines)
