"""The most memory that a rank needs to build a model of which it keeps a part: beside theory, and one whole model.

    python benchmarks/sharded_build.py --parameters 50_000_000 --ranks 2 [--step]

Theory is the rank's shards and one whole tensor, the largest: in float32, the embedding or a feed-forward matrix. What
is read from files by slices needs less. Each row is built in small first, so that what is imported on the way does not
count.

With --step, the same of a training step, by layout. A rank must hold 4 bytes of weights, 4 of gradients and 8 of the
state of AdamW for each parameter that is its own, exactly; theory adds once the most that is gathered together.
`explained` is what lives when gradients of the first block are computed: outside of blocks, the weights (embedding and
head) and the gradient of the head are whole; two blocks are gathered, one of them has gradients, and those of another
are sent, of which gloo makes a copy.

Exits with 1 if a row needs more than 1.25 times the theory.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.spawn import ProcessExitedException

from layout_names import LAYOUTS, Layout
from local_ranks import start_ranks
from onstep import Callback, CallbackManager
from onstep.checkpoint import CheckpointManager, SaveRequest, SharingPattern, StateComponent
from onstep.config import ConfigContainer, DistributedInitConfig, ModelConfig, apply_overrides
from onstep.distributed import ParallelSizes, World, open_world
from onstep.distributed.fully_sharded import blocks_of
from onstep.distributed.shards import held_part
from onstep.models.hf.any_directory import build_model as build_language_model
from onstep.models.hf.any_directory import save_directory
from onstep.training import GlobalState, forward_step, train
from onstep.training.setup.model_and_data import build_model
from onstep.training.setup.pretrained import fill_from_pretrained
from sharded_checkpoint import resident

STEPS = "one,ddp2,fsdp2,fsdp2 keep"
HIDDEN, VOCABULARY, LENGTH = 512, 8192, 64
LIMIT = 1.25
"""How many times the theory a row may need."""


def own(parameters: int) -> ModelConfig:
    """Onstep's transformer, with about so many parameters."""
    layers = max(1, round((parameters - 2 * VOCABULARY * HIDDEN) / (12 * HIDDEN**2)))
    return ModelConfig(
        num_layers=layers,
        hidden_size=HIDDEN,
        ffn_hidden_size=8 * HIDDEN // 3,
        num_attention_heads=8,
        vocab_size=VOCABULARY,
        seq_length=LENGTH,
    )


def of_transformers(parameters: int) -> ModelConfig:
    """A model of a class of transformers, with about so many parameters."""
    content = {
        "model_type": "gpt_neox",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 4 * HIDDEN,
        "num_attention_heads": 8,
        "num_hidden_layers": own(parameters).num_layers,
        "max_position_embeddings": LENGTH,
    }
    return ModelConfig(hf_config=content, vocab_size=VOCABULARY, seq_length=LENGTH)


def write_files(directory: Path, parameters: int) -> None:
    """The directories and the checkpoint that rows are read from."""
    for name, model in (("own", own(parameters)), ("theirs", of_transformers(parameters))):
        save_directory(build_language_model(model, seed=1), directory / name)
    config = ConfigContainer(model=own(parameters))
    component = StateComponent("model", build_language_model(config.model, seed=1), SharingPattern.REPLICATED)
    CheckpointManager(directory / "checkpoint", World()).save(SaveRequest(1, [component], config.to_dict()))


def rows(directory: Path, parameters: int) -> Iterator[tuple[str, ConfigContainer]]:
    """Each way to build a model, and its configuration."""
    yield "initial weights", ConfigContainer(model=own(parameters))
    yield "initial weights, transformers", ConfigContainer(model=of_transformers(parameters))
    for name, kind in (("own", "files"), ("theirs", "files, transformers"), ("checkpoint", "checkpoint")):
        config = ConfigContainer()
        config.model.seq_length = LENGTH
        config.checkpoint.pretrained_checkpoint = str(directory / name)
        yield kind, fill_from_pretrained(config)


def measure(ranks: int, parameters: int, parent: str) -> None:
    """What each rank does."""
    world, failed = open_world(DistributedInitConfig(device="cpu"), ParallelSizes(dp_shard=ranks)), False
    small, large = Path(parent) / "small", Path(parent) / "large"
    if world.is_main:
        print(f"{'':32}{'shards MB':>10}{'tensor MB':>10}{'peak MB':>10}{'of theory':>10}{'whole MB':>10}")
    for (_, warm), (name, config) in zip(rows(small, 1), rows(large, parameters), strict=True):
        for one in (warm, config):
            one.dataset.seq_length = LENGTH
            one.parallel.data_parallel_shard_size = ranks
        peak_of(warm, world)
        model, peak = peak_of(config, world)
        shards = sum(one.numel() * 4 for one in map(local, model.parameters()))
        largest = max(one.numel() * 4 for one in model.parameters())
        del model
        alone = copy.deepcopy(config)
        alone.parallel.data_parallel_shard_size = 1
        _, whole = peak_of(alone, World())
        found = world.gather_numbers([float(peak), peak / (shards + largest), float(whole)])
        peak, share, whole = (max(figures) for figures in zip(*found, strict=True))
        failed = failed or share > LIMIT
        if world.is_main:
            figures = "".join(f"{size / 1e6:10.1f}" for size in (shards, largest, peak))
            print(f"{name:32}{figures}{share:10.2f}{whole / 1e6:10.1f}", flush=True)
    world.close()
    sys.exit(int(failed))


class Peak(Callback):
    """What a rank holds in a step, and by how much its resident memory is above that at the beginning."""

    ranks = "all"

    def __init__(self) -> None:
        gc.collect()
        self._base = resident("VmRSS")
        self.held: dict[str, int] = {}
        """Bytes of parameters, gradients and optimizer state."""
        self.grown = 0
        """The most, in bytes, in the steps but the first, in which the optimizer makes its state."""

    def on_train_step_end(self, context: Any) -> None:
        """Note both."""
        parameters = [one for chunk in context.model for one in chunk.parameters()]
        state = [one for kept in context.optimizer.state.values() for one in kept.values() if one.ndim]
        kinds = {
            "weights": parameters,
            "gradients": [one.grad for one in parameters if one.grad is not None],
            "state": state,
        }
        self.held = {name: sum(held_part(one).nbytes for one in tensors) for name, tensors in kinds.items()}
        if context.state.train_state.step > 0:
            self.grown = max(self.grown, resident("VmHWM") - self._base)
        Path("/proc/self/clear_refs").write_text("5")


def measure_steps(name: str, layout: Layout, parameters: int) -> None:
    """What each rank does: steps of a small model, so that what they load does not count, then of the large one."""
    failed = False
    world: World | None = None
    for size in (1, parameters):
        config = ConfigContainer(model=own(size))
        config.dist.device, config.dataset.seq_length, config.train.train_iters = "cpu", LENGTH, 4
        config.train.micro_batch_size, config.train.global_batch_size = 1, layout.ranks
        config.logger.log_interval, config.validation.eval_iters = 0, None
        apply_overrides(config, list(layout.keys))
        world = world or open_world(config.dist, config.parallel_sizes(layout.ranks))
        state, peak = GlobalState(config, world=world), Peak()
        model = build_model(config, world, state)
        optimizer = torch.optim.AdamW(model[0].parameters(), lr=1e-4, fused=True)
        rows = torch.randint(VOCABULARY, (8, LENGTH), generator=torch.Generator().manual_seed(world.rank))
        data = iter([{"tokens": row[None], "labels": row[None]} for row in rows])
        manager = CallbackManager()
        manager.add(peak)
        train(forward_step, model, optimizer, None, data, None, state, callback_manager=manager)
        if size == parameters:
            failed = report_step(name, config, world, peak, model[0])
        del model, optimizer, state, data
    if world is not None:
        world.close()
    sys.exit(int(failed))


def gathered(model: nn.Module, shards: int) -> tuple[int, int, int]:
    """Bytes of the largest part that is gathered at once, of what is outside of the blocks, and of a block."""
    if shards == 1:
        return 0, 0, 0
    whole, *in_blocks = (sum(one.numel() * 4 for one in part.parameters()) for part in (model, *blocks_of(model)))
    left = whole - sum(in_blocks)
    return max(left, *in_blocks), left, max(in_blocks)


def report_step(name: str, config: ConfigContainer, world: World, peak: Peak, model: nn.Module) -> bool:
    """Print the row of a layout, of the rank with the largest peak; whether it is not as it must be. Collective."""
    weights, gradients, state = peak.held.values()
    is_exact = gradients == weights and state == 2 * weights
    shards = world.sizes.dp_shard
    whole = sum(one.numel() * 4 for one in model.parameters())
    is_exact &= sum(row[0] for row in world.gather_numbers([float(weights)])) == whole * world.size / shards
    together, left, block = gathered(model, shards)
    held = weights + gradients + state
    explained = held - (left + block) // shards + left + left // 2 + 5 * block
    if shards == 1 or not config.fsdp.reshard_after_forward:
        explained = 0
        together = whole if shards > 1 else 0  # each block's weights stay from the forward pass to the backward pass
    theory = held + together
    grown = max(row[0] for row in world.gather_numbers([float(peak.grown)]))
    if world.is_main:
        sizes = (*peak.held.values(), together, theory, grown)
        figures = "".join(f"{size / 1e6:11.1f}" for size in sizes)
        said = "" if is_exact else "  NOT EXACT"
        print(
            f"{name:14}{figures}{grown / theory:11.2f}{f'{explained / 1e6:.1f}' if explained else '':>11}{said}",
            flush=True,
        )
    return not is_exact or grown > LIMIT * theory


def local(parameter: nn.Parameter) -> torch.Tensor:
    """This rank's part."""
    part: torch.Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return part


def peak_of(config: ConfigContainer, world: World) -> tuple[nn.Module, int]:
    """The model, and by how many bytes resident memory grew at most."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    model = build_model(config, world, GlobalState(config, world=world))[0]
    return model, resident("VmHWM") - before


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=20_000_000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--step", nargs="?", const=STEPS, help="a step of each layout (names, with commas), not a build"
    )
    options = parser.parse_args()
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "65536")  # without it freed memory stays with the process
    if options.step:
        kinds = ("weights", "gradients", "state", "gathered", "theory", "peak", "of theory", "explained")
        print(f"{'MB on a rank':14}{''.join(f'{kind:>11}' for kind in kinds)}")
        failed = False
        for name in options.step.split(","):
            try:
                start_ranks(measure_steps, LAYOUTS[name].ranks, name, LAYOUTS[name], options.parameters)
            except ProcessExitedException:  # a rank whose row is out of bounds; the others are measured, too
                failed = True
        sys.exit(int(failed))
    with tempfile.TemporaryDirectory() as parent:
        write_files(Path(parent) / "small", 1)
        write_files(Path(parent) / "large", options.parameters)
        start_ranks(measure, options.ranks, options.ranks, options.parameters, parent)


if __name__ == "__main__":
    main()
