"""What fixed gradient buckets cost: steps of two gloo ranks, in blocks that alternate with torch's DDP.

The last row, with all gradients in one bucket that is reduced after the backward pass, shows what overlap is worth.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from onstep.config import DistributedDataParallelConfig, ModelConfig
from onstep.distributed import World, data_parallel
from onstep.models import build_transformer

RANKS, BLOCKS, STEPS, BATCH, SEQ = 2, 10, 4, 2, 128
LIMIT = 1.05
"""Largest ratio of the medians, ours to torch's."""
MODEL = ModelConfig(num_layers=6, hidden_size=256, num_attention_heads=4, vocab_size=2048, seq_length=SEQ)


def main() -> None:
    """Print seconds per step of each layout, and exit with 1 if ours is slower than the limit."""
    spawn(_rank, (sys.argv[1:] or ["1"],), nprocs=RANKS)  # type: ignore[no-untyped-call]


def _rank(rank: int, arguments: list[str]) -> None:
    cap_mb = float(arguments[0])
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29617"}
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    world = World(rank=rank, size=RANKS)
    layouts: dict[str, Callable[[nn.Module], nn.Module]] = {
        "torch's DDP": lambda model: DistributedDataParallel(model, bucket_cap_mb=cap_mb, gradient_as_bucket_view=True),
        "fixed buckets": lambda model: data_parallel(
            [model], world, DistributedDataParallelConfig(bucket_cap_mb=cap_mb)
        )[0],
        "one bucket": lambda model: data_parallel([model], world, DistributedDataParallelConfig(bucket_cap_mb=4096))[0],
    }
    models = {name: wrap(build_transformer(MODEL, seed=0)) for name, wrap in layouts.items()}
    tokens = torch.randint(0, MODEL.vocab_size or 1, (BATCH, SEQ))
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for block in range(BLOCKS + 1):
        for name, model in models.items():
            for _ in range(STEPS):
                started = time.perf_counter()
                model(tokens, tokens, reduction="sum").backward()
                model.zero_grad()
                if block:  # the first one warms up
                    seconds[name].append(time.perf_counter() - started)
    if rank == 0:
        _report(seconds, cap_mb)
    dist.destroy_process_group()


def _report(seconds: dict[str, list[float]], cap_mb: float) -> None:
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    reference = medians["torch's DDP"]
    print(f"{RANKS} ranks, buckets of {cap_mb:g} MiB, {BLOCKS} blocks of {STEPS} steps:")
    for name, median in medians.items():
        print(f"  {name:14}{median * 1e3:8.1f} ms per step, {median / reference:.3f} of torch's")
    if medians["fixed buckets"] > LIMIT * reference:
        sys.exit(f"fixed buckets are more than {LIMIT} times as slow as torch's")


if __name__ == "__main__":
    main()
