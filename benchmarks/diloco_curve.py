"""Compares DiLoCo with data-parallel training, each at its best learning rate, over the number of rounds.

    python benchmarks/diloco_curve.py [--rounds 16 32 64 128] [--workers 2] [--sync-every 50] [--outer 0.7,0.9 ...]
                                      [--from "random weights"] [--picture FILE]

A transformer of 70,000 parameters is trained for so many rounds: by data parallelism, which is one process with the
batches of all workers, and by workers with the real outer optimizer, on as many tokens, in one process and in
float32. Each is trained with three learning rates or more, until one is better than its half and its double: its loss
on held-out text counts. All have a warm-up and a cosine decay over the whole training. They begin with random
weights, or with those of a number of data-parallel steps, as those of the paper do (Douillard et al. 2023, arXiv
2311.08105). Printed is the ratio of both losses. `--outer` compares several learning rates and momenta of the outer
optimizer, each with its best inner learning rate; data parallelism has none to tune, so the lowest of many flatters
DiLoCo. The paper, with 150 million parameters and 8 workers: after 128 rounds of 500 steps, the perplexity of DiLoCo
is 0.1 lower than that of data-parallel training.

Takes about half an hour on a free core. Exits with 1 if a ratio is above `LIMITS`: with the paper's momentum
(`--outer 0.7,0.9`), those from random weights are.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from diloco_rules import new_fragment
from diloco_sites import BATCH, Bench, Site, Tensors, corpus, difference, new_model, values
from onstep.diloco.outer import LEARNING_RATE, MOMENTUM, sgd
from onstep.diloco.server.averaging import Contribution

FIRST_RATE = 6e-3
"""The peak learning rate that is tried first, with its half and its double."""
LIMITS = {64: 1.03, 128: 1.02}
"""Greatest ratios, by the number of rounds."""
STARTS = ("random weights", "common steps")


@dataclass(frozen=True)
class Best:
    """The lowest loss and its learning rate."""

    loss: float
    rate: float

    def __str__(self) -> str:
        return f"{self.loss:8.4f} at {self.rate:.2g}"


@dataclass(frozen=True)
class Curve:
    """Trainings of one length."""

    bench: Bench
    workers: int
    first: Tensors
    """The weights that all begin with."""
    outer: tuple[float, float] = (LEARNING_RATE, MOMENTUM)
    """Learning rate and momentum of the outer optimizer."""

    def site(self, index: int, lr: float, batch: int) -> Site:
        """A worker."""
        total = self.bench.rounds * self.bench.steps
        return Site(index, self.bench.text, total, lr=lr, batch=batch, warmup=max(20, total // 20))

    def data_parallel(self, lr: float) -> float:
        """The loss with the batches of all workers at each step."""
        site = self.site(0, lr, BATCH * self.workers)
        return self.bench.loss(site.train(self.first, self.bench.rounds * self.bench.steps, 0))

    def diloco(self, lr: float) -> float:
        """The loss of the workers' common model."""
        sites = [self.site(index, lr, BATCH) for index in range(self.workers)]
        fragment = new_fragment(sgd(*self.outer), self.first)
        for number in range(self.bench.rounds):
            start, step = fragment.newest.parameters, number * self.bench.steps
            ends = [site.train(start, self.bench.steps, step) for site in sites]
            fragment.newest = fragment.step([Contribution(difference(start, end), "fp32", 1.0) for end in ends])
        return self.bench.loss(fragment.newest.parameters)


def best(loss_with: Callable[[float], float], rate: float = FIRST_RATE) -> Best:
    """Of a learning rate that is better than its half and its double."""
    losses: dict[float, float] = {}
    while True:
        for one in (rate, rate / 2, rate * 2):
            if one not in losses:
                losses[one] = loss_with(one)
        lowest = min((rate / 2, rate, rate * 2), key=lambda one: losses[one])
        if lowest == rate:
            return Best(losses[rate], rate)
        rate = lowest


def common_weights(text: torch.Tensor, steps: int, workers: int) -> Tensors:
    """Those of a data-parallel training."""
    site = Site(99, text, steps, batch=BATCH * workers)
    return site.train(values(new_model()), steps, 0)


def draw(ratios: dict[str, dict[int, float]], output: str) -> None:
    """One line for each start and outer optimizer."""
    figure = Figure(figsize=(6.5, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_prop_cycle(color=("#4477aa", "#cc6677", "#228833", "#ccbb44", "#66ccee", "#aa3377"))
    for name, curve in ratios.items():
        axes.plot(list(curve), list(curve.values()), "o-", label=name)
    axes.axhline(1, color="gray", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(curve), [str(rounds) for rounds in curve])
    axes.set_xlabel("rounds")
    axes.set_ylabel("validation loss / data-parallel")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(output, dpi=110)


def arguments() -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, nargs="+", default=(16, 32, 64, 128))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--sync-every", type=int, default=50)
    parser.add_argument("--common-steps", type=int, default=400)
    parser.add_argument("--outer", type=outer_rates, nargs="+", default=[(LEARNING_RATE, MOMENTUM)])
    parser.add_argument("--from", dest="starts", nargs="+", choices=STARTS, default=STARTS)
    parser.add_argument("--picture", help="where to write the curves as PNG")
    return parser.parse_args()


def outer_rates(text: str) -> tuple[float, float]:
    """Learning rate and momentum, as `0.7,0.9`."""
    rate, momentum = map(float, text.split(","))
    return rate, momentum


def ratios_of(curve: Curve, outers: Sequence[tuple[float, float]], name: str) -> Iterator[tuple[str, float]]:
    """A label and the ratio for each outer optimizer; prints a row for each."""
    reference = best(curve.data_parallel)
    for outer in outers:
        found = best(replace(curve, outer=outer).diloco)
        label, ratio = f"{name}, outer {outer[0]:g}, {outer[1]:g}", found.loss / reference.loss
        print(f"{label:<32} {curve.bench.rounds:>6}   {reference}   {found} {ratio:7.4f}", flush=True)
        yield label if len(outers) > 1 else name, ratio


def main() -> int:
    """Print the curves; the exit code is 1 if a limit is exceeded."""
    given = arguments()
    torch.set_num_threads(1)
    begin, text = time.monotonic(), corpus()
    held_out, text = text[-200_000:], text[:-200_000]
    ratios: dict[str, dict[int, float]] = defaultdict(dict)
    print(f"{given.workers} workers, {given.sync_every} steps a round, {given.common_steps} common steps")
    print(f"outer settings tried: {len(given.outer)}; data parallelism has none")
    print(f"{'from':<32} {'rounds':>6}   {'data parallel':<16}   {'DiLoCo':<16} {'ratio':>7}")
    for name in given.starts:
        first = values(new_model()) if name == STARTS[0] else common_weights(text, given.common_steps, given.workers)
        for rounds in given.rounds:
            curve = Curve(Bench(text, held_out, rounds, given.sync_every), given.workers, first)
            for label, ratio in ratios_of(curve, given.outer, name):
                ratios[label][rounds] = ratio
    print(f"took {time.monotonic() - begin:.0f} s")
    if given.picture:
        draw(ratios, given.picture)
    above = [
        f"{ratio:.3f} after {rounds} rounds from {name}, above {LIMITS[rounds]}"
        for name, found in ratios.items()
        for rounds, ratio in found.items()
        if ratio > LIMITS.get(rounds, float("inf"))
    ]
    print("\n".join(above) or "all within their limits")
    return 1 if above else 0


if __name__ == "__main__":
    sys.exit(main())
