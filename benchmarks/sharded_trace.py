"""Draws when each rank computes and when it communicates in a step, and tells how much is both.

    python benchmarks/sharded_trace.py --output docs/assets/fsdp_overlap.png [--blocking]
    python benchmarks/sharded_trace.py --layout "distopt2 both" --output docs/assets/divided_overlap.png

Two ranks of one thread train over gloo, which has threads of its own; torch's profiler notes what runs where. The model
is in shards, or its updates are divided. The shortest of several steps is drawn, in which the machine did the least of
something else. With --blocking every gather and scatter is awaited: of shards at once, as torch does on a CPU, and of
divided updates after the pass, as without overlaps.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch.profiler import ProfilerActivity, profile, record_function

from layout_names import LAYOUTS, Layout
from local_ranks import start_ranks
from onstep import Callback, CallbackManager
from onstep.distributed import fully_sharded, open_world
from onstep.models.transformer import build_transformer
from onstep.training import GlobalState, forward_step, train
from onstep.training.setup.placement import place
from sharded_step import Workload

WORKLOAD = Workload(layers=6, hidden=256, vocabulary=1024, length=128, rows=4, micro_batches=1, block=1)
_AHEAD = replace(LAYOUTS["fsdp2"], keys=(*LAYOUTS["fsdp2"].keys, "fsdp.prefetch=1"))
TRACED = {
    "fsdp2": (_AHEAD, _AHEAD),
    "distopt2 both": (LAYOUTS["distopt2 both"], LAYOUTS["distopt2"]),
}
"""Layouts, and what they are with --blocking."""
FIRST, STEPS = 4, 23
"""The first of the profiled steps, and the last."""
STEP = "step of the benchmark"
COMPUTE = {"forward": "#c3cad2", "backward": "#8b97a5", "norm, update": "#4d5966"}
COLORS = COMPUTE | {"gather": "#2f6db5", "scatter": "#d9772b", "small sums": "#5a9e6f"}
_SENT_BY = {"c10d::_reduce_scatter_base_": "scatter", "c10d::allreduce_": "small sums"}

Span = tuple[float, float]
"""Begin and end, in microseconds."""


class Recorder(Callback):
    """Profiles some steps, each from its update to the norm of the next one, under a name."""

    ranks = "all"
    reads_weights = False

    def __init__(self, path: str) -> None:
        self._path, self._profile = path, profile(activities=[ProfilerActivity.CPU])
        self._mark = record_function(STEP)

    def on_pre_optimizer_step(self, context: Any) -> None:
        """End a step and begin another, and write the trace after the last one."""
        step = context.state.train_state.step + 1
        if step > FIRST:
            self._mark.__exit__(None, None, None)
        if step == FIRST:
            self._profile.start()
        elif step == STEPS:
            self._profile.stop()
            self._profile.export_chrome_trace(self._path)
        if FIRST <= step < STEPS:
            self._mark = record_function(STEP)
            self._mark.__enter__()  # type: ignore[no-untyped-call]


def run(directory: str, layout: Layout, is_blocking: bool) -> None:
    """What each rank does."""
    logging.disable(logging.WARNING)
    if is_blocking:
        for name in ("gather_beside", "scatter_beside"):
            setattr(fully_sharded, name, lambda modules: None)
    config = WORKLOAD.config(layout, STEPS)
    world = open_world(config.dist, config.parallel_sizes(layout.ranks))
    [model] = place([build_transformer(config.model, seed=0)], world, config)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    manager = CallbackManager()
    manager.add(Recorder(f"{directory}/{world.rank}.json"))
    state, loader = GlobalState(config, world=world), WORKLOAD.loader(world, STEPS)
    train(forward_step, [model], optimizer, None, loader, None, state, callback_manager=manager)
    world.close()


def steps_of(path: Path) -> list[dict[str, list[Span]]]:
    """For each step, what ran when by kind; the key `step` has its begin and end."""
    trace = json.loads(path.read_text())
    base = float(trace.get("baseTimeNanoseconds", 0)) / 1e3
    events = sorted((one for one in trace["traceEvents"] if one.get("ph") == "X"), key=lambda one: float(one["ts"]))
    spans = [(str(one["name"]), one["tid"], (base + one["ts"], base + one["ts"] + one["dur"])) for one in events]
    main = next(thread for name, thread, _ in spans if name == STEP)
    launched = [_SENT_BY[name] for name, thread, _ in spans if thread == main and name in _SENT_BY]
    reduced = [span for name, _, span in spans if name == "gloo:all_reduce"]  # by which gloo scatters too
    found: dict[str, list[Span]] = {kind: [] for kind in COLORS}
    found["gather"] = [span for name, _, span in spans if name.startswith("gloo:all_gather")]
    found["scatter"] = [span for name, _, span in spans if name == "gloo:all_to_all"]  # where updates are divided
    for kind, span in zip(launched, reduced, strict=False):
        found[kind].append(span)
    of_fsdp = merged([span for name, thread, span in spans if thread == main and name.startswith(("FSDP::", "c10d::"))])
    found |= computed(spans, main, of_fsdp)
    steps = [span for name, _, span in spans if name == STEP]
    return [
        {"step": [step]}
        | {kind: [one for one in of_kind if step[0] <= one[0] <= step[1]] for kind, of_kind in found.items()}
        for step in steps
    ]


def computed(spans: list[tuple[str, Any, Span]], main: Any, of_fsdp: list[Span]) -> dict[str, list[Span]]:
    """When a rank computes: the forward passes, the backward passes, and the rest of the steps."""
    ops = [(name, span) for name, thread, span in spans if thread == main and name.startswith(("aten::", "autograd::"))]
    backward = merged([span for name, span in ops if name.startswith("autograd::")])
    steps = [span for name, _, span in spans if name == STEP]
    first = [span[0] for name, span in ops if name == "aten::embedding"]
    bounds = [
        (min(one for one in first if start <= one <= end), min(one[0] for one in inside), max(one[1] for one in inside))
        for start, end in steps
        if (inside := [one for one in backward if start <= one[0] <= end])
    ]  # where the forward pass of each step begins, and where its backward pass begins and ends
    busy = without(merged([span for _, span in ops]), of_fsdp)
    found: dict[str, list[Span]] = {kind: [] for kind in COMPUTE}
    for one in busy:
        around = next((bound for bound in bounds if bound[0] <= one[0] < bound[2]), None)
        kind = "norm, update" if around is None else "forward" if one[0] < around[1] else "backward"
        found[kind].append(one)
    return found


def merged(spans: Sequence[Span]) -> list[Span]:
    """The same time as disjoint spans, in order."""
    result: list[Span] = []
    for begin, end in sorted(spans):
        if result and begin <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((begin, end))
    return result


def without(spans: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """The time of disjoint spans that is not in the others."""
    result: list[Span] = []
    for begin, end in spans:
        for start, stop in others:
            if stop > begin and start < end:
                if start > begin:
                    result.append((begin, start))
                begin = max(begin, stop)
        if begin < end:
            result.append((begin, end))
    return result


def length(spans: Sequence[Span]) -> float:
    """Microseconds."""
    return sum(end - begin for begin, end in spans)


def busy_in(step: dict[str, list[Span]]) -> list[Span]:
    """When a rank computes in a step."""
    return merged([span for kind in COMPUTE for span in step[kind]])


def draw(ranks: list[dict[str, list[Span]]], output: str) -> None:
    """Two lanes for each rank."""
    zero = min(of_rank["step"][0][0] for of_rank in ranks)
    figure = Figure(figsize=(11, 3), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    lanes: list[str] = []
    for rank, of_rank in enumerate(ranks):
        for lane, kinds in (("computes", list(COMPUTE)), ("communicates", ["gather", "scatter", "small sums"])):
            for kind in kinds:
                bars = [((begin - zero) / 1e3, (end - begin) / 1e3) for begin, end in of_rank[kind]]
                label = kind if rank == 0 else None
                axes.broken_barh(bars, (len(lanes) - 0.4, 0.8), facecolors=COLORS[kind], label=label)
            lanes.append(f"rank {rank} {lane}")
    axes.set_yticks(range(len(lanes)), lanes)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(ncols=6, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    axes.set_xlim(left=0)
    figure.savefig(output, dpi=110)


def main() -> None:
    """Trace, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="overlap.png")
    parser.add_argument("--layout", choices=TRACED, default="fsdp2")
    parser.add_argument("--blocking", action="store_true")
    options = parser.parse_args()
    layout = TRACED[options.layout][options.blocking]
    with tempfile.TemporaryDirectory() as directory:
        start_ranks(run, layout.ranks, directory, layout, options.blocking)
        of_ranks = [steps_of(Path(directory) / f"{rank}.json") for rank in range(layout.ranks)]
    shortest = min(zip(*of_ranks, strict=True), key=lambda ranks: max(length(one["step"]) for one in ranks))
    for kind in ("gather", "scatter"):
        total = sum(length(merged(one[kind])) for one in shortest)
        alone = sum(length(without(merged(one[kind]), busy_in(one))) for one in shortest)
        calls = sum(len(one[kind]) for one in shortest)
        print(f"{kind}: {calls} on {len(of_ranks)} ranks, {total / 1e3:.1f} ms, {1 - alone / total:.0%} inside compute")
    print(f"the step takes {max(length(one['step']) for one in shortest) / 1e3:.1f} ms")
    draw(list(shortest), options.output)


if __name__ == "__main__":
    main()
