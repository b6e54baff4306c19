"""One DiLoCo server and 200 real connections of tiny workers: descriptors, threads, memory, and the length of a round.

Run with `python benchmarks/diloco_connections.py`; it takes a minute or two. The server is a process of its own, and
the workers are threads of another one, each a `DiLoCoWorker` with its heartbeats. Limits: every worker is in every
round, all end with the server's parameters bit for bit, the server has at most two descriptors for each worker and 20
more, and its threads do not depend on the workers (at most 20).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onstep.diloco.client import DiLoCoClient
from onstep.diloco.codec.specs import digest
from onstep.diloco.protocol.messages import Settings
from onstep.diloco.server import DiLoCoServer
from onstep.diloco.worker import DiLoCoWorker

TOKEN, STEPS = "of-this-benchmark", 5
FREE_DESCRIPTORS, MOST_THREADS = 20, 20


def main() -> int:
    """Print what was counted; returns 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        _serve(arguments.workers)
        return 0
    command = [sys.executable, __file__, "--serve", f"--workers={arguments.workers}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdin is not None
        address = server.stdout.readline().strip()
        seconds, digests, most = _train(arguments.workers, arguments.rounds, address, server.pid)
        server.stdin.close()
        said = json.loads(server.stdout.readline())
    expected = arguments.workers * arguments.rounds
    rows = [
        ("contributions", said["contributions"], expected, said["contributions"] == expected),
        ("different parameters", len({*digests, said["digest"]}) - 1, 0, {*digests} == {said["digest"]}),
        ("descriptors", most["descriptors"], 2 * arguments.workers + FREE_DESCRIPTORS, None),
        ("threads", most["threads"], MOST_THREADS, None),
    ]
    held = True
    for name, found, limit, holds in rows:
        holds = found <= limit if holds is None else holds
        print(f"{name}: {found}, limit {limit}: {'holds' if holds else 'BEYOND THE LIMIT'}")
        held &= holds
    print(f"memory of the server: {most['memory'] / 1e6:.0f} MB with {arguments.workers} workers")
    print(f"a round of a worker: median {statistics.median(seconds):.2f} s, longest {max(seconds):.2f} s")
    return 0 if held else 1


def _model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(30, 30)


def _serve(workers: int) -> None:
    settings = Settings(num_workers=workers, min_workers=workers, sync_every=STEPS, codec="int8")
    with DiLoCoServer(_model(), settings=settings, port=0, token=TOKEN) as server:
        print(server.address, flush=True)
        sys.stdin.read()
        counts = server._state.coordinator.counts
        parameters = server.get_global_params()
        print(json.dumps({"contributions": counts["contributions"], "digest": digest(parameters)}), flush=True)


def _train(workers: int, rounds: int, address: str, server: int) -> tuple[list[float], list[str], dict[str, int]]:
    """Seconds of the rounds, hashes of the parameters of all workers at the end, and the most that the server had."""
    seconds: list[float] = []
    digests: list[str] = []
    start = threading.Barrier(workers)

    def work(index: int) -> None:
        model = _model()
        client = DiLoCoClient(address, token=TOKEN)
        with DiLoCoWorker(model, None, "", worker_id=f"w{index}", client=client, heartbeat_interval=2) as worker:
            start.wait()
            for _ in range(rounds):
                with torch.no_grad():
                    model.weight[index % 30] += 0.01
                begun = time.perf_counter()
                for _ in range(STEPS):
                    worker.end_step()
                seconds.append(time.perf_counter() - begun)
        digests.append(digest({name: one.detach() for name, one in model.named_parameters()}))

    threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(workers)]
    for thread in threads:
        thread.start()
    most = {"descriptors": 0, "threads": 0, "memory": 0}
    while any(thread.is_alive() for thread in threads):
        most = {name: max(number, most[name]) for name, number in _of_process(server).items()}
        time.sleep(0.2)
    return seconds, digests, most


def _of_process(pid: int) -> dict[str, Any]:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return {
        "descriptors": len(list(Path(f"/proc/{pid}/fd").iterdir())),
        "threads": int(status["Threads"]),
        "memory": int(status["VmRSS"].split()[0]) * 1024,
    }


if __name__ == "__main__":
    sys.exit(main())
