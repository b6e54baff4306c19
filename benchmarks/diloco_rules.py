"""Compares rules for absent workers and for asynchronous ones, by the loss that a small transformer reaches with them.

Run with `python benchmarks/diloco_rules.py absences`, `... outages` or `... asynchronous` (minutes; `--rounds 8` for a
short look). Everything is in one process, on a virtual clock, with the real outer optimizers and weights;
`asynchronous` also has the real coordinator and `DiLoCoWorker`. The figures of decisions 0054 and 0058 are those of
an outer momentum of 0.9, those of 0073 of 0.6.

- `absences`: three workers; one is cut off after a quarter of the rounds, trains on, and returns after 1, 2, 5 or 20
  rounds. Its loss relative to the same run in which it never returns, the greatest weight of a round over the mean,
  the most steps by which a round advances the run, and the steps that are lost.
- `outages`: three workers; the server is away for 1, 2, 5 or 20 rounds, after a quarter of them, and all train on.
  The loss relative to the same run in which they give that work up, and the losses of the model before the outage,
  with the round that was pending, and with each of the three rounds after it.
- `asynchronous`: 2, 3 and 5 workers of different speed, by the defaults of the server and by others. The loss relative
  to synchronous rounds with as many samples.
"""

from __future__ import annotations

import argparse
import heapq
import math
import time
from dataclasses import dataclass
from typing import Any

import torch

from diloco_sites import Bench, Tensors, corpus, difference, new_model, values
from onstep.diloco.codec.body import read_body, write_body
from onstep.diloco.codec.formats import encode
from onstep.diloco.codec.specs import specs_of
from onstep.diloco.outer import OuterFactory, delayed, nesterov_sgd, sgd
from onstep.diloco.protocol import aging
from onstep.diloco.protocol.coordinator import Coordinator
from onstep.diloco.protocol.messages import Ready, Reply, Request, Settings, Submit, fingerprint
from onstep.diloco.server.averaging import Contribution
from onstep.diloco.server.masters import Fragment
from onstep.diloco.worker import DiLoCoWorker

ABSENCES = (1, 2, 5, 20)
SPEEDS = {2: (1.0, 0.6), 3: (1.0, 0.7, 0.4), 5: (1.0, 0.9, 0.7, 0.5, 0.3)}


def new_fragment(factory: OuterFactory = nesterov_sgd, first: Tensors | None = None) -> Fragment:
    """The masters at the beginning."""
    first = first or values(new_model())
    return Fragment(specs_of(first), first, factory, "fp32")


@dataclass(frozen=True)
class Rule:
    """How work counts that is late."""

    name: str
    is_rebased: bool = False
    """Whether the next submission is fresh, with the weight of all its tokens."""
    limit: float = math.inf
    """Rounds, above which it is dropped."""
    ages: bool = True
    """Whether its weight falls with the age."""

    def weights(self, given: list[aging.Contribution], version: int) -> list[float]:
        """Of the contributions of a round."""
        if self.is_rebased:
            return [one.weight / (version - one.submit.base_version) for one in given]
        factor = [1 if self.ages else version - one.submit.base_version for one in given]
        return [one.weight * by for one, by in zip(aging.weighed(given, version), factor, strict=True)]


RULES = (
    Rule("rebased, weighted by all tokens", is_rebased=True, limit=1),
    Rule("dropped if late at all", limit=0),
    Rule("at most the mean, / (1 + s), dropped above 1", limit=1),
    Rule("at most the mean, / (1 + s), never dropped"),
    Rule("at most the mean, never dropped", ages=False),
)


OUR_OUTAGE = "the mean of the workers, without momentum"


class Absence:
    """A run of three workers, of which the first is cut off for some rounds."""

    def __init__(self, bench: Bench, rule: Rule, begin: int, rounds: int | None) -> None:
        self.bench, self.rule, self.begin = bench, rule, begin
        self.back = bench.rounds if rounds is None else begin + rounds
        self.sites, self.fragment = bench.sites(3), new_fragment()
        self.step = self.jump = 0.0
        self.lost = self.carried = 0
        self.greatest = 1.0
        self.origin = 0
        self._model: Tensors = {}
        """Of the first worker, where it continues."""

    def run(self) -> float:
        """The loss at the end."""
        for number in range(self.bench.rounds):
            self._round(number)
        return self.bench.loss(self.fragment.newest.parameters)

    def _round(self, number: int) -> None:
        steps, newest = self.bench.steps, self.fragment.newest
        found: list[tuple[Tensors, int, int]] = []
        for site in self.sites[1:]:
            end = site.train(newest.parameters, steps, self.step)
            found.append((difference(newest.parameters, end), steps, number))
        if number < self.begin or number > self.back:
            start = self._model if number > self.back else newest.parameters
            end, amount = self.sites[0].train(start, steps, self.step), steps + self.carried
            origin = self.origin if self.carried else number
            found += self._counted(difference(newest.parameters, end), amount, origin, number)
            self.carried = 0
        elif number < self.back:
            self._train_alone(number)
        else:
            self._train_alone(number)
            kept = self._return(number, found)
        self._outer_step(found, number + 1)
        after = dict(self.fragment.newest.parameters)
        self._model = after
        if number == self.back:
            self._continue(after, kept, number + 1)

    def _train_alone(self, number: int) -> None:
        if number == self.begin:
            self._start, self._first_step = dict(self.fragment.newest.parameters), self.step
        model = self._start if number == self.begin else None
        end = self.sites[0].train(model, self.bench.steps, self._first_step + (number - self.begin) * self.bench.steps)
        if number == self.begin:
            self._submitted = end
        self._end = end

    def _counted(self, delta: Tensors, amount: int, origin: int, number: int) -> list[tuple[Tensors, int, int]]:
        if self.rule.is_rebased:
            origin = number
        if number - origin <= self.rule.limit:
            return [(delta, amount, origin)]
        self.lost += amount
        return []

    def _return(self, number: int, found: list[tuple[Tensors, int, int]]) -> Tensors:
        """Send what was pending; returns the later progress."""
        is_counted = number - self.begin <= self.rule.limit
        if is_counted:
            found.append((difference(self._start, self._submitted), self.bench.steps, self.begin))
        self.carried = (number - self.begin + (not is_counted)) * self.bench.steps
        return difference(self._end, self._submitted if is_counted else self._start)

    def _continue(self, after: Tensors, kept: Tensors, version: int) -> None:
        self.origin = version if self.rule.is_rebased else self.begin
        if version - self.origin <= self.rule.limit:
            self._model = {name: value + kept[name] for name, value in after.items()}
        else:
            self.lost, self.carried = self.lost + self.carried, 0

    def _outer_step(self, found: list[tuple[Tensors, int, int]], version: int) -> None:
        given = [
            aging.Contribution(Submit(str(index), "", version, 0, base, amount, amount), float(amount))
            for index, (_, amount, base) in enumerate(found)
        ]
        weights = self.rule.weights(given, version)
        is_old = self.rule.is_rebased
        steps = max(amount for _, amount, _ in found) if is_old else aging.steps_of_round(given, version)
        self.step, self.jump = self.step + steps, max(self.jump, steps)
        self.greatest = max(self.greatest, max(weights) * len(weights) / sum(weights))
        contributions = [Contribution(found[i][0], "fp32", weight) for i, weight in enumerate(weights)]
        self.fragment.newest = self.fragment.step(contributions)


class Outage:
    """A run of three workers, which all train on while the server is away."""

    def __init__(self, bench: Bench, rule: str, begin: int, rounds: int) -> None:
        self.bench, self.rule, self.begin, self.away = bench, rule, begin, rounds
        self.sites, self.fragment = bench.sites(3), new_fragment()
        self.losses: list[float] = []
        """Of the model: before the outage, and after each of the next rounds."""

    def run(self) -> float:
        """The loss at the end."""
        number = 0
        while number < self.bench.rounds:
            if number == self.begin:
                self.losses.append(self._loss())
            ends = self._train(number, dict(self.fragment.newest.parameters))
            self._outer_step([difference(dict(self.fragment.newest.parameters), end) for end in ends])
            if number == self.begin:
                for _ in range(self.away):
                    number += 1
                    later = self._train(number, None)
                self._return([difference(end, one) for end, one in zip(ends, later, strict=True)])
            number += 1
        return self._loss()

    def _train(self, number: int, start: Tensors | None) -> list[Tensors]:
        return [site.train(start, self.bench.steps, number * self.bench.steps) for site in self.sites]

    def _return(self, drifts: list[Tensors]) -> None:
        if self.rule == "given up":
            return
        is_mean = self.rule == OUR_OUTAGE and self.away > 1
        self._outer_step(drifts, 1 / self.away if self.rule == "as far as in a cycle" else 1.0, is_mean)

    def _outer_step(self, differences: list[Tensors], scale: float = 1.0, is_mean: bool = False) -> None:
        given = [Contribution(one, "fp32", 1.0, scale) for one in differences]
        self.fragment.newest = self.fragment.step(given, is_mean)
        if self.losses and len(self.losses) < 5:
            self.losses.append(self._loss())

    def _loss(self) -> float:
        return self.bench.loss(self.fragment.newest.parameters)


class Server:
    """The coordinator and the masters behind the `send` of a client; without sockets."""

    def __init__(self, settings: Settings, factory: OuterFactory) -> None:
        self.fragment, specs = new_fragment(factory), specs_of(values(new_model()))
        self.coordinator = Coordinator(settings, run_id="run", fingerprint=fingerprint(specs))

    def send(self, request: Request, body: bytes = b"") -> tuple[Reply, Any]:
        """As of a client."""
        reply = self.coordinator.handle(request, time.monotonic())
        for closed in self.coordinator.take_closed():
            given = [
                Contribution(read_body(body), one.submit.codec, one.weight, one.scale) for one in closed.contributions
            ]
            self.fragment.newest = self.fragment.step(given)
            self.coordinator.committed(closed, self.fragment.newest.digest, time.monotonic())
        if not isinstance(reply, Ready):
            return reply, b""
        return reply, write_body(encode(self.fragment.newest.parameters, "fp32"))

    def close(self) -> None:
        """There is nothing to close."""


def synchronous(bench: Bench, count: int) -> float:
    """The loss by rounds, with the defaults."""
    sites, fragment = bench.sites(count), new_fragment()
    for number in range(bench.rounds):
        start = fragment.newest.parameters
        ends = [site.train(start, bench.steps, number * bench.steps) for site in sites]
        fragment.newest = fragment.step([Contribution(difference(start, end), "fp32", 1.0) for end in ends])
    return bench.loss(fragment.newest.parameters)


def asynchronous(bench: Bench, factory: OuterFactory, count: int) -> float:
    """The loss by workers of different speed, which do as many steps together."""
    server = Server(Settings.with_quorum(count, "async", sync_every=bench.steps, heartbeat_timeout=0.0), factory)
    sites, done = bench.sites(count), 0
    queue: list[tuple[float, int]] = []
    workers = [
        DiLoCoWorker(site.model, None, "", worker_id=f"w{index}", client=server, heartbeat_interval=0)
        for index, site in enumerate(sites)
    ]
    for index, worker in enumerate(workers):
        worker.start()
        heapq.heappush(queue, (bench.steps / SPEEDS[count][index], index))
    while done < count * bench.rounds * bench.steps:
        now, index = heapq.heappop(queue)
        for step in range(bench.steps):
            sites[index].train(None, 1, done / count + step)
            workers[index].end_step()
        done += bench.steps
        heapq.heappush(queue, (now + bench.steps / SPEEDS[count][index], index))
    return bench.loss(server.fragment.newest.parameters)


def compare_absences(bench: Bench) -> None:
    """Print a row for each rule and absence."""
    begin = bench.rounds // 4
    never = Absence(bench, RULES[1], begin, None).run()
    print(f"never returns: {never:.4f}\n{'away':>4} {'of that':>8} {'weight':>7} {'jump':>5} {'lost':>5}  rule")
    for rounds in (one for one in ABSENCES if begin + one < bench.rounds - 1):
        for rule in RULES:
            run = Absence(bench, rule, begin, rounds)
            ratio = run.run() / never
            print(f"{rounds:4} {ratio:8.4f} {run.greatest:7.2f} {run.jump:5.0f} {run.lost:5}  {rule.name}", flush=True)


def compare_outages(bench: Bench) -> None:
    """Print a row for each rule and outage."""
    begin, rules = bench.rounds // 4, ("given up", "as before", "as far as in a cycle", OUR_OUTAGE)
    print("away  of that  losses before, with the pending round, and after  rule")
    for rounds in (one for one in ABSENCES if begin + one < bench.rounds - 1):
        given_up = 0.0
        for rule in rules:
            run = Outage(bench, rule, begin, rounds)
            end = run.run()
            given_up = given_up or end
            shown = " ".join(f"{loss:.4f}" for loss in run.losses)
            print(f"{rounds:4} {end / given_up:8.4f}  {shown}  {rule}", flush=True)


def compare_asynchronous(bench: Bench, counts: tuple[int, ...]) -> None:
    """Print a row for each rule and number of workers."""
    print("workers     loss  of rounds  rule")
    for count in counts:
        rounds = synchronous(bench, count)
        print(f"{count:7} {rounds:8.4f} {1:10.4f}  synchronous rounds", flush=True)
        rules = {
            "the defaults": delayed(nesterov_sgd, count),
            "delayed Nesterov with momentum 0.9": delayed(sgd(momentum=0.9), count),
            "Nesterov with momentum 0.9 at each submission": sgd(momentum=0.9),
        }
        for name, factory in rules.items():
            loss = asynchronous(bench, factory, count)
            print(f"{count:7} {loss:8.4f} {loss / rounds:10.4f}  {name}", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["absences", "outages", "asynchronous"])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=15, help="of a round")
    parser.add_argument("--workers", type=int, nargs="*", choices=list(SPEEDS), default=list(SPEEDS))
    given = parser.parse_args()
    torch.set_num_threads(1)
    text = corpus()
    bench = Bench(text[:-200_000], text[-200_000:], given.rounds, given.steps)
    if given.what == "absences":
        compare_absences(bench)
    elif given.what == "outages":
        compare_outages(bench)
    else:
        compare_asynchronous(bench, tuple(given.workers))


if __name__ == "__main__":
    main()
