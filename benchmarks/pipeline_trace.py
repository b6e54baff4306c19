"""Records when the ranks of a pipeline compute, for each schedule, and compares how long they are idle with theory.

    python benchmarks/pipeline_trace.py --output docs/assets/pipeline_schedules.png [--ranks 4] [--micro-batches 8]
        [--milliseconds 50]

Real ranks over gloo train a tiny model by `train()`, of which each layer, a stage of its own, sleeps: 50 ms in the
forward pass, 50 ms where it computes the gradient of its input, and 50 ms where it computes those of its weights. So
ranks do not compete for processors; on a machine that has much else to do, longer passes hide what waking up costs.
`ProfilerCallback` records them as it does in any run, and `onstep.analysis.pipeline_traces` reads the traces.

Idle is the time without a pass, beside that of the passes, (p - 1) / (m v) for schedules whose backward passes are
whole. `in theory` is that of the same order with passes of exactly that time and no time for sending; the first stage
has no input to compute a gradient of, so all of its backward pass is one of weights. torch's DualPipeV sends what a
forward pass computes only after the backward pass that is paired with it. The shortest of several steps
counts, in which the machine did the least of something else. Ends with 1 if it is more than 5 points from theory.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from layout_names import TWICE, Layout, stages
from local_ranks import start_ranks
from onstep import CallbackManager
from onstep.analysis.pipeline_traces import PipelineStep, read_steps
from onstep.analysis.plots.axes import QUIET_COLOUR, TEXT_COLOUR
from onstep.analysis.plots.output import new_figure, save
from onstep.analysis.plots.pipeline import draw_pipeline, legend_of
from onstep.callbacks import ProfilerCallback
from onstep.config.pipelines import SCHEDULES
from onstep.distributed import open_world
from onstep.models.transformer import build_transformer
from onstep.training import GlobalState, forward_step, train
from onstep.training.setup.model_and_data import cut_into_stages
from onstep.training.setup.placement import place
from sharded_step import Workload

POINTS = 0.05
_UNITS = {"forward": 1.0, "backward": 2.0, "input gradient": 1.0, "weight gradient": 1.0}
"""How long each part of a pass lasts."""
_FIRST = {"forward": 1.0, "backward": 2.0, "input gradient": 0.0, "weight gradient": 2.0}
"""The same on the first stage."""
_WARM, _RECORDED = 1, 9
"""Steps."""


class _Slow(torch.autograd.Function):
    """Returns its input, later; and so its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, before: float, after: float) -> Tensor:
        ctx.after = after
        time.sleep(before)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.after)
        return gradients[0], None, None


def _linear(module: nn.Linear, seconds: float, x: Tensor) -> Tensor:
    """What a linear layer computes, with the time of a stage in each part of its pass."""
    slow: Any = _Slow.apply
    return functional.linear(slow(x, seconds, seconds), slow(module.weight, 0.0, seconds), module.bias)


def run(directory: str, layouts: dict[str, Layout], micro_batches: int, seconds: float) -> None:
    """What each rank does."""
    logging.disable(logging.WARNING)
    steps = _WARM + _RECORDED
    for name, layout in layouts.items():
        layers = layout.ranks * (1 if SCHEDULES[name].chunks == "one" else 2)
        workload = Workload(layers, hidden=16, vocabulary=32, length=8, rows=1, micro_batches=micro_batches, block=1)
        config = workload.config(layout, steps)
        world = open_world(config.dist, config.parallel_sizes(layout.ranks))
        whole = build_transformer(config.model, seed=0)
        layers_of_model: Any = whole.layers
        for layer in layers_of_model:
            down = layer.feed_forward.down
            down.forward = partial(_linear, down, seconds)
        model = place(cut_into_stages([whole], config, world), world, config)
        optimizer = torch.optim.AdamW([one for chunk in model for one in chunk.parameters()])
        manager = CallbackManager()
        manager.add(
            ProfilerCallback(
                _WARM, _RECORDED, f"{directory}/{name}", with_stack=False, with_flops=False, record_shapes=False
            )
        )
        state = GlobalState(config, num_microbatches=micro_batches, world=world)
        with redirect_stdout(StringIO()):  # the profiler's tables
            loader = workload.loader(world, steps)
            train(forward_step, model, optimizer, None, loader, None, state, callback_manager=manager)
        world.close()


def in_theory(step: PipelineStep) -> PipelineStep:
    """The order of a step with passes of exactly one unit of time for each part."""
    exact = [
        [replace(one, begin=0.0, end=(_FIRST if one.stage == 0 else _UNITS)[one.part]) for one in passes]
        for passes in step.ranks
    ]
    return PipelineStep(exact).in_order()


def formula(name: str, ranks: int, micro_batches: int) -> float:
    """(p - 1) / (m v)."""
    return (ranks - 1) / (micro_batches * (1 if SCHEDULES[name].chunks == "one" else 2))


def draw(found: dict[str, PipelineStep], path: str) -> None:
    """A panel for each schedule, all with the same scale where they have the same stages."""
    figure = new_figure((11, 1.25 * len(found) + 0.8))
    rows = figure.subplots(len(found), 1)
    for axes, (name, step) in zip(rows, found.items(), strict=True):
        alike = [
            one
            for other, one in found.items()
            if (SCHEDULES[other].chunks == "one") == (SCHEDULES[name].chunks == "one")
        ]
        draw_pipeline(axes, step, width=max(one.seconds for one in alike))
        axes.set_title(
            f"{name}: idle for {step.idle:.0%} of the time of the passes", loc="left", fontsize=9, color=TEXT_COLOUR
        )
        axes.tick_params(labelsize=8)
    rows[-1].set_xlabel("seconds", fontsize=8, color=QUIET_COLOUR)
    figure.legend(handles=legend_of([*found.values()]), loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    save(figure, path, dpi=130)


def main() -> int:
    """Record, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", help="a picture of a step of each")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--milliseconds", type=float, default=50.0, help="of each part of a pass")
    parser.add_argument("--schedules", default=",".join(SCHEDULES), help="names, with commas")
    options = parser.parse_args()
    layouts = {
        name: stages(options.ranks, name, *([TWICE] if SCHEDULES[name].chunks != "one" else []))
        for name in options.schedules.split(",")
    }
    found: dict[str, PipelineStep] = {}
    with tempfile.TemporaryDirectory() as directory:
        start_ranks(run, options.ranks, directory, layouts, options.micro_batches, options.milliseconds / 1e3)
        print(f"{'idle beside the passes':24}{'recorded':>9}{'in theory':>11}{'(p-1)/(m v)':>13}{'ms a step':>11}")
        for name in layouts:
            found[name] = min(read_steps([Path(directory) / name]), key=lambda one: one.seconds)
    well = True
    for name, step in found.items():
        theory = in_theory(step).idle
        is_near = abs(step.idle - theory) <= POINTS
        well &= is_near
        of_formula = formula(name, options.ranks, options.micro_batches)
        print(
            f"{name:24}{step.idle:9.1%}{theory:11.1%}{of_formula:13.1%}{step.seconds * 1e3:11.0f}"
            f"{'' if is_near else '  MISSED'}"
        )
    if options.output is not None:
        draw(found, options.output)
    return int(not well)


if __name__ == "__main__":
    sys.exit(main())
