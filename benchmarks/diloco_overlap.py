"""Validation losses of rounds that overlap with training, beside those that workers wait for, at the same steps.

Run with `python benchmarks/diloco_overlap.py`; it takes some minutes. Three workers train a transformer of 70,000
parameters on the default corpus, over real sockets; every run has the same data. Limits, of the loss without overlap:

- merged after some steps, and averaged with the local parameters (Streaming DiLoCo): 1.02;
- eager, merged after a whole cycle (Eager Updates): 1.05. Beside it, without a limit, the same without eager updates.
"""

from __future__ import annotations

import argparse
import sys
import threading
from typing import Any

import torch
from torch import nn

from diloco_sites import Bench, Site, corpus, new_model
from onstep.diloco.client import DiLoCoClient
from onstep.diloco.protocol.messages import Settings
from onstep.diloco.server import DiLoCoServer
from onstep.diloco.worker import DiLoCoWorker

WORKERS, TOKEN = 3, "of-this-benchmark"
CYCLE = 30
RUNS: dict[str, tuple[dict[str, Any], float]] = {
    "without overlap": ({}, 1.0),
    "merged after 3 steps": ({"overlap_steps": 3}, 1.02),
    "2 fragments, merged after 6 steps": ({"num_fragments": 2, "overlap_steps": 6}, 1.02),
    "merged after a cycle": ({"overlap_steps": CYCLE}, float("inf")),
    "eager, merged after a cycle": ({"overlap_steps": CYCLE, "eager": True}, 1.05),
}


def main() -> int:
    """Train, print a row for each run, and return 1 if a loss is beyond its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    text = corpus()
    bench = Bench(text[:-200_000], text[-200_000:], arguments.rounds, CYCLE)
    held, reference = True, 0.0
    for name, (settings, limit) in RUNS.items():
        loss = _trained(bench, settings)
        reference = reference or loss
        holds = loss <= limit * reference
        shown = f"loss {loss:.4f} after {bench.rounds} x {CYCLE} steps, {loss / reference:.4f} of that without overlap"
        print(f"{name}: {shown}, <= {limit}: {'holds' if holds else 'BEYOND THE LIMIT'}", flush=True)
        held &= holds
    return 0 if held else 1


def _trained(bench: Bench, settings: dict[str, Any]) -> float:
    run = Settings(num_workers=WORKERS, min_workers=WORKERS, sync_every=CYCLE, codec="int8", **settings)
    with DiLoCoServer(new_model(), settings=run, port=0, token=TOKEN) as server:
        sites = bench.sites(WORKERS)
        threads = [
            threading.Thread(target=_work, args=(bench, site, index, server.address))
            for index, site in enumerate(sites)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return bench.loss(server.get_global_params())


def _work(bench: Bench, site: Site, index: int, address: str) -> None:
    client = DiLoCoClient(address, token=TOKEN)
    model: nn.Module = site.model
    with DiLoCoWorker(model, site.optimizer, "", worker_id=f"site-{index}", client=client):
        for step in range(bench.rounds * CYCLE):
            site.train(None, 1, step)


if __name__ == "__main__":
    sys.exit(main())
