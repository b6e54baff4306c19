"""The most memory that a rank needs to build a model of which it keeps a part: beside theory, and one whole model.

    python benchmarks/sharded_build.py --parameters 50_000_000 --ranks 2

Theory is the rank's shards and one whole tensor, the largest: in float32, the embedding or a feed-forward matrix. What
is read from files by slices needs less. Each row is built in small first, so that what is imported on the way does not
count. Exits with 1 if a row needs more than 1.25 times the theory.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.multiprocessing.spawn import spawn

from onstep.checkpoint import CheckpointManager, SaveRequest, SharingPattern, StateComponent
from onstep.config import ConfigContainer, DistributedInitConfig, ModelConfig
from onstep.distributed import ParallelSizes, World, open_world
from onstep.models.hf.any_directory import build_model as build_language_model
from onstep.models.hf.any_directory import save_directory
from onstep.training import GlobalState
from onstep.training.setup.model_and_data import build_model
from onstep.training.setup.pretrained import fill_from_pretrained
from sharded_checkpoint import resident

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


def measure(rank: int, ranks: int, port: int, parameters: int, parent: str) -> None:
    """What each rank does."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
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
    options = parser.parse_args()
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "65536")  # without it freed memory stays with the process
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    with tempfile.TemporaryDirectory() as parent:
        write_files(Path(parent) / "small", 1)
        write_files(Path(parent) / "large", options.parameters)
        arguments = (options.ranks, port, options.parameters, parent)
        spawn(measure, arguments, nprocs=options.ranks)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
