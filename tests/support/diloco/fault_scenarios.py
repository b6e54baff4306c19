"""One fault at one state of the protocol, in a run of real processes that is checked afterwards."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from tests.support.diloco.fault_modes import Mode
from tests.support.diloco.fault_proxy import Forwarded, Phase, Proxy
from tests.support.diloco.fault_run import FaultRun
from tests.support.forked_processes import Processes

Kind = Literal["Register", "Submit", "Await", "Heartbeat", "Deregister"]
Act = Literal[
    "kill worker", "stop worker", "kill server", "stop server", "lose answer", "repeat", "repeat later", "cut off"
]
PAUSE = 0.6
"""Seconds for which something is stopped, cut off or dead."""


@dataclass(frozen=True)
class Scenario:
    """What happens to worker 0, or to the server, when worker 0 sends a request of a kind."""

    kind: Kind
    phase: Phase
    act: Act

    def __str__(self) -> str:
        return f"{self.act}, {self.phase} {self.kind}"


ALL = [Scenario(*one) for one in itertools.product(get_args(Kind), get_args(Phase), get_args(Act))]
OF_ROUNDS = [
    one
    for one in ALL
    if one.kind in ("Submit", "Await") and one.act in ("kill worker", "kill server", "lose answer", "repeat later")
]
SHORT = [
    ("sync", Scenario("Submit", "after", "kill server")),
    ("sync", Scenario("Await", "before", "kill worker")),
    ("sync", Scenario("Submit", "before", "repeat later")),
    ("sync", Scenario("Register", "after", "lose answer")),
    ("sync", Scenario("Await", "after", "stop server")),
    ("sync", Scenario("Deregister", "after", "repeat later")),
    ("sync with checkpoints", Scenario("Await", "before", "kill worker")),
    ("int8", Scenario("Submit", "after", "kill server")),
    ("streaming int8 with checkpoints", Scenario("Submit", "after", "kill worker")),
    ("async", Scenario("Submit", "after", "lose answer")),
    ("async int8 with checkpoints", Scenario("Await", "before", "kill worker")),
]
"""One of each sort, for every run of the tests."""


def run_scenario(scenario: Scenario, mode: Mode, processes: Processes, directory: Path) -> Counter[str]:
    """Let it happen, wait until all workers are well again, and check the run; the counts."""
    run = FaultRun(processes, directory, mode)
    done = threading.Event()
    errors: list[BaseException] = []

    def act(proxy: Proxy, forwarded: Forwarded) -> str | None:
        try:
            return ACTS[scenario.act](run, proxy, forwarded, done)
        except BaseException as error:  # noqa: BLE001 - raised below, in the test's thread
            errors.append(error)
            done.set()
            return "lose"

    try:
        number = 1 if scenario.kind in ("Register", "Deregister") else 3
        run.proxies[0].at(scenario.kind, number, scenario.phase, act)
        run.start()
        if scenario.kind == "Deregister":
            _let_leave(run, done)
        run.until(done.is_set)
        assert not errors, errors
        run.advance(3)
        run.end()
        counts = run.check()
        return counts + Counter(faults=1)
    finally:
        run.close()


def _let_leave(run: FaultRun, done: threading.Event) -> None:
    """Have worker 0 leave and come back, unless the fault has it start again."""
    run.advance(1)
    leaving = run.workers[0]
    run.leave(0)
    run.until(done.is_set)
    if run.workers[0] is leaving:
        assert leaving.wait() == 0
        run.start_worker(0)


def run_storm(
    seed: int, faults: Mapping[str, int] | int, mode: Mode, processes: Processes, directory: Path
) -> Counter[str]:
    """Let faults happen at random instants, repeat every request, and check the run; the counts.

    Args:
        seed: of the order of the faults, and of their instants.
        faults: how many of which kind; or how many of any but an absence, which lasts for rounds.
        mode: of the run.
        processes: where they are started.
        directory: of the run.
    """
    run, chance = FaultRun(processes, directory, mode), random.Random(seed)
    counts: Counter[str] = Counter()
    try:
        for proxy in run.proxies:
            proxy.repeats_all = True
        run.start()
        run.advance(1)
        chosen = (
            [one for one, number in faults.items() for _ in range(number)]
            if isinstance(faults, Mapping)
            else chance.choices([one for one in STORM if one != "absence"], k=faults)
        )
        chance.shuffle(chosen)
        for fault in chosen:
            time.sleep(chance.uniform(0.0, 0.5))
            STORM[fault](run, chance)
            counts[f"faults: {fault}"] += 1
        run.advance(3)
        run.end()
        return run.check() + counts + Counter(faults=len(chosen))
    finally:
        run.close()


Loss = Literal["its answers are lost", "it is cut off", "all are cut off"]
"""Because of which a submission of worker 0 is pending."""


def restored_while_pending(loss: Loss, mode: Mode, processes: Processes, directory: Path) -> Counter[str]:
    """Worker 0 makes a checkpoint while the fate of a submission is not known, is killed, and continues from there."""
    run = FaultRun(processes, directory, mode, bound=1.0)
    try:
        run.start()
        run.advance(2)
        _lose(run, loss, True)
        before = len(run.lines("w0"))
        run.until(lambda: any(line.get("pending") for line in run.lines("w0")[before:]))
        run.kill_worker(0)
        _lose(run, loss, False)
        run.start_worker(0)
        run.advance(3)
        run.end()
        return run.check() + Counter(faults=1)
    finally:
        run.close()


def _lose(run: FaultRun, loss: Loss, is_lost: bool) -> None:
    if loss == "its answers are lost":
        run.proxies[0].loses_answers = is_lost
    else:
        run.cut((0,) if loss == "it is cut off" else range(run.num_workers), is_lost)


def _killed_worker(run: FaultRun, chance: random.Random) -> None:
    index = chance.randrange(run.num_workers)
    run.kill_worker(index)
    time.sleep(chance.uniform(0.0, 0.5))
    run.start_worker(index)


def _left(run: FaultRun, chance: random.Random) -> None:
    index = chance.randrange(run.num_workers)
    run.leave(index)
    assert run.workers[index].wait() == 0
    run.start_worker(index)


def _killed_server(run: FaultRun, chance: random.Random) -> None:
    run.kill_server()
    time.sleep(chance.uniform(0.0, 0.5))
    run.start_server()


def _stopped_worker(run: FaultRun, chance: random.Random) -> None:
    """Sometimes for longer than the server's heartbeat timeout."""
    run.pause(run.workers[chance.randrange(run.num_workers)], chance.choice((0.3, 3.0)))


def _stopped_server(run: FaultRun, chance: random.Random) -> None:
    run.pause(run.server, chance.uniform(0.1, 1.0))


def _cut_off_some(run: FaultRun, chance: random.Random) -> None:
    some = chance.sample(range(run.num_workers), chance.randint(1, run.num_workers))
    run.cut(some, True)
    time.sleep(chance.choice((0.3, 3.0)))
    run.cut(some, False)


def _silent_line(run: FaultRun, chance: random.Random) -> None:
    """Sometimes for longer than a worker waits."""
    some, seconds = chance.sample(run.proxies, chance.randint(1, run.num_workers)), chance.choice((0.5, 2.0, 5.0))
    for proxy in some:
        proxy.is_silent = True
    time.sleep(seconds)
    run.stopped_seconds += seconds
    for proxy in some:
        proxy.is_silent = False


def _absent(run: FaultRun, chance: random.Random) -> None:
    """A worker is cut off until the others have committed rounds, and comes back."""
    index, before = chance.randrange(run.num_workers), run.num_committed()
    rounds = chance.choice((1, 2, 5, 20)) * run.mode.num_fragments
    run.cut((index,), True)
    run.until(lambda: run.num_committed() >= before + rounds)
    run.cut((index,), False)


STORM: dict[str, Callable[[FaultRun, random.Random], None]] = {
    "kill worker": _killed_worker,
    "leave": _left,
    "kill server": _killed_server,
    "stop worker": _stopped_worker,
    "stop server": _stopped_server,
    "cut off": _cut_off_some,
    "silent line": _silent_line,
    "absence": _absent,
}


def _kill_worker(run: FaultRun, proxy: Proxy, forwarded: Forwarded, done: threading.Event) -> str:
    run.until(lambda: 0 in run.workers)
    run.kill_worker(0)
    _later(PAUSE / 2, lambda: run.start_worker(0), done)
    return "lose"


def _stop_worker(run: FaultRun, proxy: Proxy, forwarded: Forwarded, done: threading.Event) -> None:
    run.until(lambda: 0 in run.workers)
    run.pause(run.workers[0], PAUSE)
    done.set()


def _kill_server(run: FaultRun, proxy: Proxy, forwarded: Forwarded, done: threading.Event) -> str:
    run.kill_server()
    _later(PAUSE / 2, run.start_server, done)
    return "lose"


def _stop_server(run: FaultRun, proxy: Proxy, forwarded: Forwarded, done: threading.Event) -> None:
    run.pause(run.server, PAUSE)
    done.set()


def _lose_answer(run: FaultRun, proxy: Proxy, forwarded: Forwarded, done: threading.Event) -> str:
    done.set()
    return "lose"


def _repeat(run: FaultRun, proxy: Proxy, forwarded: Forwarded, done: threading.Event) -> None:
    forwarded.send()
    done.set()


def _repeat_later(run: FaultRun, proxy: Proxy, forwarded: Forwarded, done: threading.Event) -> None:
    for seconds in (0.05, 0.3, PAUSE):
        forwarded.send_later(seconds)
    _later(PAUSE, lambda: None, done)


def _cut_off(run: FaultRun, proxy: Proxy, forwarded: Forwarded, done: threading.Event) -> str:
    proxy.is_cut = True

    def heal() -> None:
        proxy.is_cut = False

    _later(PAUSE, heal, done)
    return "lose"


def _later(seconds: float, work: Callable[[], None], done: threading.Event) -> None:
    def run() -> None:
        time.sleep(seconds)
        work()
        done.set()

    threading.Thread(target=run, daemon=True).start()


ACTS: dict[str, Callable[[FaultRun, Proxy, Forwarded, threading.Event], str | None]] = {
    "kill worker": _kill_worker,
    "stop worker": _stop_worker,
    "kill server": _kill_server,
    "stop server": _stop_server,
    "lose answer": _lose_answer,
    "repeat": _repeat,
    "repeat later": _repeat_later,
    "cut off": _cut_off,
}
