"""A run with all trackers that is killed again and again until it has ended, and the run that nobody disturbs."""

from __future__ import annotations

import json
import random
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from onstep.record import WALL_CLOCK_FIELDS, Record, read_records, without_wall_clock
from onstep.trackers import complete
from tests.support.faults.kill_outcome import course
from tests.support.faults.tracker_services import BufferingTracker, Curves, Service, SocketTracker
from tests.support.forked_processes import Child, Processes, output_of
from tests.support.jobs.tracker_storm_jobs import SERVICES, STEPS
from tests.support.tracker_files import scalars, table, texts

JOBS = "tests.support.jobs.tracker_storm_jobs"


class TrackedRun:
    """A run in a directory of its own, with its services.

    Args:
        hangs: The chances of the service that hangs; None lets it work.
    """

    def __init__(
        self, processes: Processes, directory: Path, door: str, common: Mapping[str, Any], hangs: random.Random | None
    ) -> None:
        self.directory, self.door = directory, door
        self._processes = processes
        self._sockets = Path(tempfile.mkdtemp(prefix="storm-"))  # a socket's path must be short
        self.services = {
            name: Service(self._sockets / f"{name}.sock", hangs if name == "hanging" else None) for name in SERVICES
        }
        self._settings = {**common, "sockets": str(self._sockets), "close_timeout": 60 if hangs is None else 1}

    @property
    def path(self) -> Path:
        """The run's directory."""
        return self.directory / "runs" / "run"

    @property
    def run_id(self) -> str:
        return str(json.loads((self.path / "run.json").read_text())["run_id"])

    @property
    def step(self) -> int:
        """The last step in the record; 0 if there is none."""
        record = self.path / "record.jsonl"
        lines = record.read_bytes()[-20_000:].splitlines()[1:] if record.exists() else []
        steps = [int(found[1]) for line in lines if (found := re.search(rb'"global_step": ?(\d+)', line))]
        return steps[-1] if steps else 0

    @property
    def output(self) -> str:
        return output_of(self.directory)

    def start(self, **settings: Any) -> Child:
        [child] = self._processes.start(JOBS, self.door, self.directory, {**self._settings, **settings})
        return child

    def complete(self) -> dict[str, int]:
        """Send each service what it lacks, once all are well; the number of lines that each was sent."""
        for service in self.services.values():
            service.be_well()
        kinds = {name: BufferingTracker if name == "buffering" else SocketTracker for name in SERVICES}
        return {
            name: complete(self.path, kinds[name](name, self._sockets / f"{name}.sock"), names=["hf"])
            for name in SERVICES
        }

    def close(self) -> None:
        for service in self.services.values():
            service.stop()
        shutil.rmtree(self._sockets)


class TrackerStorm:
    """Kills a run in its start, at random steps and its end, and before, within and after changes of files.

    Meanwhile one service hangs, one is down for half of the kills, and one restarts with nothing, twice.
    """

    def __init__(self, run: TrackedRun, num_kills: int, seed: int) -> None:
        self.run, self.num_kills = run, num_kills
        self.outcomes: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._empties_at = set(self._random.sample(range(num_kills - 2), 2))
        self._start_up_seconds = 0.5

    def rage(self) -> None:
        """Kill, start again, kill, ... and at last let the run end."""
        self.run.services["absent"].stop()
        for number in range(self.num_kills):
            if number == self.num_kills // 2:
                self.run.services["absent"].start()
            if not self._kill(number):
                break
        self.run.services["absent"].start()
        if self.outcomes["ended"] == 0:
            code = self.run.start().wait(300)
            assert code == 0, self.run.output
            self.outcomes["ended"] += 1

    @property
    def kills(self) -> int:
        """How many there were."""
        return self.outcomes.total() - self.outcomes["ended"]

    def _kill(self, number: int) -> bool:
        """Start the run and kill it; whether it had not ended before."""
        is_last = number >= self.num_kills - 2
        aim = "after the steps" if is_last else self._random.choice(["in the start", "in a step", "at a change"])
        settings: dict[str, Any] = {}
        if aim == "at a change":
            how = self._random.choice(["before", "within", "after"])
            settings, aim = {"operation": self._random.randint(1, 200), "how": how}, f"{how} a change of a file"
        child = self.run.start(**settings)
        if number in self._empties_at:
            self._pause(child, self._random.uniform(0, 2 * self._start_up_seconds))
            if child.is_alive and self.run.step < STEPS - 10:  # nobody asks a service that has everything
                self.run.services["forgetful"].restart_empty()
        if not settings:
            self._wait(child, aim)
            child.end()
        code = child.wait(300)
        if code == 0:
            self.outcomes["ended"] += 1
            return False
        assert code == -9, self.run.output
        self.outcomes[aim] += 1
        return True

    def _wait(self, child: Child, aim: str) -> None:
        """Wait for the moment to kill."""
        if aim == "in the start":
            self._pause(child, self._random.uniform(0, self._start_up_seconds))
            return
        before, started = self.run.step, time.monotonic()
        step = STEPS if aim == "after the steps" else min(before + self._random.randint(1, 8), STEPS)
        while child.is_alive and self.run.step < step:
            time.sleep(0.001)
            if self.run.step != before:
                self._start_up_seconds = max(self._start_up_seconds, min(time.monotonic() - started, 3.0))
        self._pause(child, self._random.uniform(0, 0.5 if aim == "after the steps" else 0.05))

    def _pause(self, child: Child, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and child.is_alive:
            time.sleep(0.001)


def check_same(whole: TrackedRun, killed: TrackedRun) -> None:
    """Check that two runs show the same everywhere, but for what a clock has written."""
    _equal(
        "record.jsonl", *(list(map(without_wall_clock, course(run.path / "record.jsonl"))) for run in (whole, killed))
    )
    names = sorted(path.name for path in whole.path.glob("*.json") if _is_log(path))
    assert "trainer_logs.json" in names
    for name in names:
        _equal(name, *(list(map(without_wall_clock, read_records(run.path / name))) for run in (whole, killed)))
    _equal("metrics.csv", *(_rows(run.path / "metrics.csv") for run in (whole, killed)))
    for directory in ("runs/run/tensorboard", "runs/run/tensorboard/vs_samples", "tb"):
        if (whole.directory / directory).exists():
            _equal(directory, *(_scalars(run.directory / directory) for run in (whole, killed)))
            _equal(directory, *(sorted(texts(run.directory / directory)) for run in (whole, killed)))
    for name in SERVICES:
        _equal(name, *(_without_clock(run.services[name].curves(run.run_id)) for run in (whole, killed)))


def _equal(what: str, whole: Any, killed: Any) -> None:
    if whole == killed:
        return
    if isinstance(whole, dict):
        names = [key for key in {**whole, **killed} if whole.get(key) != killed.get(key)]
        shown = [f"{key}: {whole.get(key)} / {killed.get(key)}"[:400] for key in names[:8]]
    else:
        shown = [
            f"{at}: {one} / {other}"[:600]
            for at, (one, other) in enumerate(zip(whole, killed, strict=False))
            if one != other
        ][:4]
        shown.append(f"{len(whole)} / {len(killed)}")
    raise AssertionError("\n".join([f"{what} differs (undisturbed / killed)", *shown]))


def _is_log(path: Path) -> bool:
    return "branch" not in path.name and path.name not in ("run.json", "status.json") and path.read_bytes()[:1] == b"["


def _is_clock(name: str) -> bool:
    """Whether a tracker's name is of a number that depends on the clock."""
    group, _, rest = name.partition("/")
    names = (name, rest, f"{group}_{rest}")
    return any(fnmatchcase(one, field) for one in names for field in (*WALL_CLOCK_FIELDS, *CLOCK_TAGS))


CLOCK_TAGS = ("*-time*", "*_time*", "*throughput*", "*mem*", "*runtime*", "*per-second*", "*per_sec*", "*timers*")


def _without_clock(curves: Curves) -> Curves:
    return {(name, step): 0.0 if _is_clock(name) else value for (name, step), value in curves.items()}


def _scalars(directory: Path) -> dict[str, Any]:
    shown = scalars(directory)
    return {tag: [(step, 0.0 if _is_clock(tag) else value) for step, value in points] for tag, points in shown.items()}


def _rows(path: Path) -> list[Record]:
    rows = table(path).to_dict("records")
    return [{name: repr(one) for name, one in without_wall_clock(row).items()} for row in rows]
