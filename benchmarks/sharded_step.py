"""What a step costs on several ranks: `train()` beside the loop of the same layout that torch's users write by hand.

    python benchmarks/sharded_step.py [--layouts ddp2,fsdp2,"hsdp 2x2",pp2] [--rounds 12] [--clock cpu] [--profile]

Both loops train a model of their own in the same processes, of one thread each, on the same micro-batches: AdamW,
accumulation, clipping. The one by hand reads no losses and agrees on nothing. They take turns, in blocks of steps; each
block is compared with the one beside it, so that what else the machine does falls on both. A step's time is that of the
slowest rank. Printed are the medians over the rounds, and the interval that has the median of the ratios with 95 %
probability; and that the losses of both are equal is checked.

A layout that gathers beside the forward pass is also compared with itself without overlaps, which every second block of
`train()` does without. A block ends when its last gathers have.

After about 300 steps the training of the usual model amplifies rounding: then losses part where sums have another
order, by 3e-4 at 372 steps, just as those of replicas do of which one weight is changed by 3e-7. So measure in runs
below that: at most 24 rounds of a layout that is also compared without overlaps, and 49 of another.

The usual model takes about 100 ms a step; the tiny one is nothing but overhead. Exits with 1 if a step of the usual
model takes more than 1.03 times the one by hand, or more than the same without overlaps.
"""

from __future__ import annotations

import argparse
import cProfile
import logging
import math
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import ProcessExitedException
from torch.nn.parallel import DistributedDataParallel

from divided_by_hand import DividedByHand
from layout_names import LAYOUTS, Layout
from local_ranks import start_ranks
from onstep import Callback, CallbackManager
from onstep.config import ConfigContainer, ModelConfig, apply_overrides
from onstep.data import TrainLoader
from onstep.distributed import World, open_world
from onstep.distributed.buffered import BufferedDataParallel
from onstep.models.transformer import build_transformer
from onstep.training import GlobalState, forward_step, train
from onstep.training.setup.model_and_data import cut_into_stages
from onstep.training.setup.placement import place
from pipeline_by_hand import PipelineByHand
from plain_loop import mean_loss

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
LIMIT = 1.03
"""How many times the step by hand a step of the usual model may take."""
APART = 1e-5
"""How far the losses of both may be from each other, relatively."""
LR, CLIP = 1e-4, 1.0


@dataclass(frozen=True)
class Workload:
    """A model, its micro-batches, and how many steps are measured together."""

    layers: int
    hidden: int
    vocabulary: int
    length: int
    rows: int
    """Of a micro-batch."""
    micro_batches: int
    """Of a step, on each rank."""
    block: int
    """Steps between two turns."""

    def config(self, layout: Layout, steps: int) -> ConfigContainer:
        """The configuration of a run."""
        model = ModelConfig(
            num_layers=self.layers,
            hidden_size=self.hidden,
            num_attention_heads=4,
            vocab_size=self.vocabulary,
            seq_length=self.length,
        )
        config = ConfigContainer(model=model)
        config.dist.device, config.dataset.seq_length = "cpu", self.length
        config.train.micro_batch_size, config.train.train_iters = self.rows, steps
        config.logger.log_interval, config.validation.eval_iters = 0, None
        config.optimizer.lr, config.optimizer.clip_grad = LR, CLIP
        apply_overrides(config, list(layout.keys))
        ranks = config.parallel_sizes(layout.ranks).data
        config.train.global_batch_size = self.rows * self.micro_batches * ranks
        return config

    def loader(self, world: World, steps: int) -> TrainLoader:
        """Reads random tokens, the same for both loops."""
        made = torch.Generator().manual_seed(0)
        rows = self.rows * self.micro_batches * world.data.size
        return TrainLoader(
            Rows(torch.randint(self.vocabulary, (steps * rows, self.length + 1), generator=made)),
            micro_batch_size=self.rows,
            global_batch_size=rows,
            rank=world.data.rank,
            world_size=world.data.size,
        )


class Rows(torch.utils.data.Dataset[Any]):
    """Rows of tokens, each with the next one as its label."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"tokens": self.tokens[index, :-1], "labels": self.tokens[index, 1:]}


WORKLOADS = {
    "usual": Workload(layers=4, hidden=192, vocabulary=2048, length=128, rows=2, micro_batches=2, block=6),
    "tiny": Workload(layers=2, hidden=32, vocabulary=64, length=16, rows=1, micro_batches=1, block=40),
}


class ByHand:
    """The loop of a layout without Onstep, but for the model."""

    def __init__(self, config: ConfigContainer, layout: Layout, loader: TrainLoader, num_micro_batches: int) -> None:
        model = build_transformer(config.model, seed=0)
        self.parameters: list[nn.Parameter]
        shards = config.parallel.data_parallel_shard_size
        self.divided: DividedByHand | None = None
        if config.ddp.use_distributed_optimizer:
            ddp = config.ddp
            self.model: Any = DividedByHand(
                model,
                int(ddp.bucket_cap_mb * 2**18),
                LR,
                sums=ddp.overlap_grad_reduce,
                gathers=ddp.overlap_param_gather,
            )
            self.divided = self.model
        elif shards == 1:
            self.model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        else:
            names, shape = ("replicate", "shard"), (layout.ranks // shards, shards)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
            mesh = mesh if shape[0] > 1 else mesh["shard"]
            for block in model.layers:
                fully_shard(block, mesh=mesh)
            self.model = fully_shard(model, mesh=mesh)
        self.waits = shards == 1
        """Whether gradients are exchanged with the last micro-batch only."""
        self.parameters = list(model.parameters())
        self.optimizer: Any = self.divided or torch.optim.AdamW(self.parameters, lr=LR, fused=True)
        self.loader, self.micro_batches = loader, num_micro_batches
        self.losses: list[Tensor] = []

    def step(self) -> None:
        """Train on a step's micro-batches."""
        self.optimizer.zero_grad()
        read, total = self.loader.read(self.micro_batches), torch.zeros(())
        assert read is not None
        for batch in (batches := read.micro_batches):
            with self.model.no_sync() if self.waits and batch is not batches[-1] else nullcontext():
                loss = mean_loss(self.model, batch) / self.micro_batches
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        if self.divided is not None:
            self.divided.step(CLIP)
        else:
            nn.utils.clip_grad_norm_(self.parameters, CLIP)
            self.optimizer.step()
        self.losses.append(total)

    def finish(self) -> None:
        """Wait for the gathers of the last update."""
        if self.divided is not None:
            self.divided.finish()


class Overlaps:
    """Those of a model whose ranks divide the updates, on or off."""

    def __init__(self, model: BufferedDataParallel) -> None:
        self._model, self._are_on = model, True

    def switch(self) -> None:
        """Change them between two steps, after the gathers. Collective."""
        self._are_on = not self._are_on
        self._model.ddp_config.overlap_grad_reduce = self._are_on
        if self._are_on:
            self._model.enable_forward_pre_hook()
        else:
            self._model.disable_forward_pre_hook()


class Turns(Callback):
    """Times the steps of a run, and lets the loop by hand train for as many steps after each block of them."""

    ranks = "all"
    reads_weights = False

    def __init__(
        self,
        by_hand: ByHand | PipelineByHand,
        block: int,
        now: Callable[[], float],
        profile: cProfile.Profile | None,
        overlaps: Overlaps | None,
    ) -> None:
        self.by_hand, self._block, self._now, self._profile = by_hand, block, now, profile
        self._overlaps = overlaps
        self._since = 0.0
        self.losses: list[Tensor] = []
        self.ours: list[float] = []
        """Seconds of each step of the run."""
        self.theirs: list[float] = []
        """The same of the loop by hand."""

    def on_train_step_end(self, context: Any) -> None:
        """Note the loss."""
        self.losses.append(context.loss_dict["lm loss"])

    def on_step_end(self, context: Any) -> None:
        """Note the time, and change turns after a block."""
        is_last = (len(self.ours) + 1) % self._block == 0
        if is_last and self._overlaps is not None:
            self._overlaps.switch()
        self.ours.append(self._now() - self._since)
        if is_last:
            if self._profile is not None:
                self._profile.disable()
            for _ in range(self._block):
                begin = self._now()
                self.by_hand.step()
                if self._overlaps is not None and len(self.theirs) % self._block == self._block - 1:
                    self.by_hand.finish()
                self.theirs.append(self._now() - begin)
            if self._profile is not None:
                self._profile.enable()
        self._since = self._now()


@dataclass
class Figures:
    """A row of the table; microseconds."""

    by_hand: float
    ours: float
    ratio: float
    over: float
    interval: tuple[float, float]
    """Of the median of the ratios, with 95 % probability."""
    overlapped: tuple[float, float, float] | None
    """The median of the ratios to the blocks without overlaps, and its interval."""
    apart: float
    """The largest relative difference of two losses."""


def run(name: str, layout: Layout, workload: Workload, rounds: int, clock: str, profiles: bool) -> None:
    """What each rank does."""
    logging.disable(logging.WARNING)
    switches = "ddp.overlap_param_gather=true" in layout.keys
    if layout.stage_ranks > 1:  # as many as all schedules of two ranks run
        workload = replace(workload, micro_batches=4, layers=4)
    config = workload.config(layout, (rounds + 1) * workload.block * (1 + switches))  # the first round warms up
    world = open_world(config.dist, config.parallel_sizes(layout.ranks))
    loader, other = (workload.loader(world, config.train.train_iters or 0) for _ in range(2))
    chunks: list[nn.Module] = [build_transformer(config.model, seed=0)]
    model = place(cut_into_stages(chunks, config, world) if world.sizes.pp > 1 else chunks, world, config)
    optimizer = torch.optim.AdamW([one for chunk in model for one in chunk.parameters()], lr=LR, fused=True)
    state = GlobalState(config, num_microbatches=workload.micro_batches, world=world)
    profile = cProfile.Profile() if profiles else None
    by_hand: ByHand | PipelineByHand
    if world.sizes.pp > 1:
        by_hand = PipelineByHand(config, world, other, workload.micro_batches, LR)
    else:
        by_hand = ByHand(config, layout, other, workload.micro_batches)
    overlaps = Overlaps(model[0]) if switches and isinstance(model[0], BufferedDataParallel) else None
    turns = Turns(by_hand, workload.block, CLOCKS[clock], profile, overlaps)
    manager = CallbackManager()
    manager.add(turns)
    train(forward_step, model, optimizer, None, loader, None, state, callback_manager=manager)
    if profile is not None:
        profile.disable()
    found = figures(turns, world, workload.block, switches)
    if world.is_main:
        beside = "" if found.overlapped is None else "{:11.3f} [{:.3f}, {:.3f}]".format(*found.overlapped)
        print(
            f"{name:22}{found.by_hand / 1e3:8.2f}{found.ours / 1e3:9.2f}{found.ratio:8.3f} "
            f"[{found.interval[0]:.3f}, {found.interval[1]:.3f}]{found.over:9.0f}{found.apart:10.1e}{beside}",
            flush=True,
        )
        if profile is not None:
            pstats.Stats(profile).sort_stats("tottime").print_stats(30)
    world.close()
    is_slow = found.ratio > LIMIT or (found.overlapped is not None and found.overlapped[0] > 1)
    sys.exit(int((is_slow and workload.block == WORKLOADS["usual"].block) or not found.apart <= APART))


def figures(turns: Turns, world: World, block: int, switches: bool) -> Figures:
    """Medians over the rounds but the first, and whether both have trained alike. Collective."""
    every = 1 + switches
    ours, theirs = (slowest(times, world, block)[every:] for times in (turns.ours, turns.theirs))
    with_overlaps, without = ours[::every], ours[1::every]
    theirs = theirs[::every]
    ratio, *interval = median_of([one / other for one, other in zip(with_overlaps, theirs, strict=True)])
    losses = torch.stack(turns.losses).double()
    by_hand = world.sum(torch.stack(turns.by_hand.losses).double()) / world.size
    return Figures(
        by_hand=statistics.median(theirs) * 1e6,
        ours=statistics.median(with_overlaps) * 1e6,
        ratio=ratio,
        over=statistics.median(one - other for one, other in zip(with_overlaps, theirs, strict=True)) * 1e6,
        interval=(interval[0], interval[1]),
        overlapped=median_of([a / b for a, b in zip(with_overlaps, without, strict=True)]) if switches else None,
        apart=float(((losses - by_hand).abs() / by_hand).max()),
    )


def median_of(values: list[float]) -> tuple[float, float, float]:
    """The median, and the values between which it is with 95 % probability, whatever their distribution is."""
    ordered, aside = sorted(values), 0.98 * math.sqrt(len(values))
    low = max(0, math.floor(len(values) / 2 - aside))
    return statistics.median(ordered), ordered[low], ordered[-1 - low]


def slowest(times: list[float], world: World, block: int) -> list[float]:
    """For each block the median of its steps, each on the rank that was slowest in it. Collective."""
    steps = [max(of_ranks) for of_ranks in zip(*world.gather_numbers(times), strict=True)]
    return [statistics.median(steps[start : start + block]) for start in range(0, len(steps), block)]


def main() -> int:
    """Start the ranks of each row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", default="ddp2,fsdp2", help="names, with commas (benchmarks/layout_names.py)")
    parser.add_argument("--models", default="usual,tiny", help="usual, tiny or both, with a comma")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: processor time, for a busy machine")
    parser.add_argument("--profile", action="store_true", help="what a step calls on rank 0")
    options = parser.parse_args()
    print(
        f"{'ms a step':22}{'by hand':>8}{'train()':>9}{'ratio':>8}{'95 %':>15}{'over us':>10}{'losses':>10}"
        f"{'to no overlaps':>19}"
    )
    failed = False
    for model in options.models.split(","):
        for layout in options.layouts.split(","):
            row = f"{layout}, {model}"
            of_row = LAYOUTS[layout]
            arguments = (row, of_row, WORKLOADS[model], options.rounds, options.clock, options.profile)
            try:
                start_ranks(run, of_row.ranks, *arguments)
            except ProcessExitedException as error:
                failed = True
                print(f"{row}: MISSED ({error})")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
