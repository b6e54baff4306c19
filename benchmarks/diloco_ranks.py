"""The memory that a DiLoCo worker needs on each of its ranks, on the host: beside theory, by its number of ranks.

    python benchmarks/diloco_ranks.py --parameters 6_000_000 --ranks 1,2,3 --codec int8

A worker holds, in float32 for each parameter: the version that it starts from, the parameters that are in flight, what
the codec has lost, and what it had lost before (in case that the submission does not count). Each rank holds its part,
to the byte. Rank 0 has the body of a submission as well, and that of a version while it is read; theory of the most
while a round is exchanged adds the part of a newer version, one whole tensor for what is gathered, and one each for
what is encoded, decoded or hashed.

Exits with 1 if a rank holds other bytes, or needs more than 1.25 times the theory.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import ProcessExitedException

from local_ranks import start_ranks
from onstep.diloco.protocol.messages import Settings
from onstep.diloco.server import DiLoCoServer
from onstep.diloco.sizes import encoded_bytes
from onstep.diloco.worker import DiLoCoWorker
from onstep.diloco.worker.parameters import Parameters
from onstep.distributed.shards import held_part
from onstep.distributed.world import World
from sharded_checkpoint import resident

WIDTH = 1024
TOKEN = "secret"  # of a server that nobody else reaches
LIMIT = 1.25
"""How many times the theory a rank may need."""
KINDS = ("base", "submitted", "residuals", "before")


def model_of(parameters: int) -> nn.Module:
    """Square matrices with about so many elements."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(max(2, parameters // WIDTH**2))))


@torch.no_grad()
def drift(model: nn.Module, step: int) -> None:
    """A training step."""
    for parameter in model.parameters():
        part = held_part(parameter)
        part.add_(torch.linspace(-1e-3, 1e-3, part.numel()).view_as(part), alpha=1.0 + step / 3)


def held(worker: DiLoCoWorker) -> list[int]:
    """The bytes of each of `KINDS` on this rank."""
    synchronizer = worker._synchronizer
    assert synchronizer is not None
    holdings = synchronizer.holdings
    bases, submitted = ([getattr(one, kind) for one in holdings.fragments] for kind in ("base", "submitted"))
    groups: list[Sequence[Any]] = [bases, submitted, [holdings.feedback.residuals], [holdings.feedback.before]]
    return [sum(one.untyped_storage().nbytes() for part in group for one in part.values()) for group in groups]


def measure(ranks: int, parameters: int, codec: str, address: str) -> None:
    """What each rank does."""
    dist.init_process_group("gloo")
    world = World(dist.get_rank(), ranks)
    model: Any = fully_shard(model_of(parameters), mesh=init_device_mesh("cpu", (ranks,)))
    specs = Parameters(model, World()).specs
    largest = 4 * max(spec.shape[0] * spec.shape[1] for spec in specs)
    part = sum(4 * held_part(one).numel() for one in model.parameters())
    worker = DiLoCoWorker(model, None, address, worker_id=f"of-{ranks}", heartbeat_interval=0, auth_token=TOKEN)
    peak, in_flight = 0, [0]
    with worker:
        assert worker._synchronizer is not None
        holdings: Any = worker._synchronizer.holdings
        merge = holdings.merge

        def noted(*given: Any) -> None:
            in_flight[:] = held(worker)
            merge(*given)

        holdings.merge = noted
        for step in range(4):
            drift(model, step)
            gc.collect()
            now = held(worker)
            Path("/proc/self/clear_refs").write_text("5")
            before = resident("VmRSS") - sum(now)
            worker.end_step()
            if step > 1:  # by when everything is there
                peak = max(peak, resident("VmHWM") - before)
        after = held(worker)
    wire = 2 * encoded_bytes(specs, codec) if world.is_main else 0
    # with the newer version and the parameters in flight, or before it the copy of what is read
    theory = 5 * part + wire + (3 * largest if world.is_main else largest)
    expected = [part, 0, part, part] if codec != "fp32" else [part, 0, 0, 0]
    rows = world.gather([part, after, in_flight, peak, theory, after == expected])
    if world.is_main:
        for rank, (own, at_rest, in_flight, most, most_in_theory, is_exact) in enumerate(rows):
            kinds = "".join(f"{size / 1e6:11.2f}" for size in in_flight)
            numbers = f"{own / 1e6:9.2f}{kinds}{sum(at_rest) / 1e6:10.2f}{most / 1e6:9.1f}{most_in_theory / 1e6:9.1f}"
            print(f"{ranks:5}{rank:6}{numbers}{most / most_in_theory:8.2f}{'' if is_exact else '   NOT THE PART'}")
    failed = any(not is_exact or most > LIMIT * limit for _, _, _, most, limit, is_exact in rows)
    dist.barrier()
    dist.destroy_process_group()
    if failed:
        sys.exit(1)


def main() -> None:
    """Start a server, and workers one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=6_000_000)
    parser.add_argument("--ranks", default="1,2,3", help="numbers of ranks, with commas")
    parser.add_argument("--codec", default="int8")
    options = parser.parse_args()
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # without it freed memory stays with the process
    columns = ("base", "submitted", "residuals", "before", "at rest", "peak", "theory", "ratio")
    print("MB on the host; each kind while a submission is in flight")
    print(f"{'ranks':>5}{'rank':>6}{'part':>9}", *(f"{name:>10}" for name in columns), sep="")
    failed = False
    for ranks in map(int, options.ranks.split(",")):
        settings = Settings(num_workers=1, min_workers=1, sync_every=1, codec=options.codec)
        with DiLoCoServer(model_of(options.parameters), settings=settings, port=0, token=TOKEN) as server:
            try:
                start_ranks(measure, ranks, ranks, options.parameters, options.codec, server.address)
            except ProcessExitedException:
                failed = True
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
