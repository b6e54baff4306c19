"""Trains on a stream that is never on disk whole, with kills: `python benchmarks/streams.py`.

A server in a process of its own makes the files of a stream on request, JSON lines of 16 KiB; nothing is stored. A run
of a tiny model reads all of it through `pretrain`, and is killed by SIGKILL at random steps and started again, on the
given numbers of ranks in turn. Each sample begins with the number of its record: of each step the last time it was
trained counts, and all records must occur once. The memory of the training processes is printed over time.

    python benchmarks/streams.py                              # a few MB, 2 kills, 1 and 2 ranks in turn
    python benchmarks/streams.py --mib 2048 --kills 10        # 2 GiB
    python benchmarks/streams.py --mib 2048 --kills 0 --ranks 1
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

LENGTH = 16 << 10
"""Tokens of a record, its end token included."""
FILE_RECORDS = 256
BATCH = 64
_AROUND = len(json.dumps({"text": ""})) + 1
RECORD_BYTES = LENGTH - 1 + _AROUND
_FILLER = "".join(random.Random(0).choices("abcdefghijklmnopqrstuvwxyz ", k=2 * LENGTH))


def line_of(number: int) -> bytes:
    """The line of a record."""
    start = number * 37 % LENGTH
    return json.dumps({"text": f"{number:015d}{_FILLER[start : start + LENGTH - 16]}"}).encode() + b"\n"


class Files(BaseHTTPRequestHandler):
    """Answers requests for a file from a byte on, line by line."""

    def do_GET(self) -> None:
        """Send the rest of the file."""
        start = int((self.headers.get("Range") or "bytes=0-")[6:].partition("-")[0])
        file, size = int(self.path[1:6]), FILE_RECORDS * RECORD_BYTES
        self.send_response(206)
        self.send_header("Content-Length", str(size - start))
        self.send_header("Content-Range", f"bytes {start}-{size - 1}/{size}")
        self.end_headers()
        try:
            for at in range(start // RECORD_BYTES, FILE_RECORDS):
                self.wfile.write(line_of(file * FILE_RECORDS + at)[max(start - at * RECORD_BYTES, 0) :])
        except OSError:
            return  # the reader has enough

    def log_message(self, *_: object) -> None:
        """Print nothing."""


def serve(ports: Any) -> None:
    """Serve, and say where."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Files)
    server.daemon_threads = True
    ports.put(server.server_address[1])
    server.serve_forever()


def train(url: str, steps: int, directory: Path, start: int) -> None:
    """Train or continue the run as a rank of the job, and note the records of each step."""
    import torch

    from onstep import Callback, pretrain
    from onstep.recipes import tiny_gpt_pretrain_config

    torch.set_num_threads(1)
    notes = (directory / f"start-{start}-rank-{os.environ['RANK']}").open("a")

    class Notes(Callback):
        """Writes the records of each step before it is trained."""

        def on_train_step_start(self, context: Any) -> None:
            """Write a line; it is in the system's memory when the process is killed."""
            rows = [row for batch in context.micro_batches for row in batch["tokens"][:, :15].tolist()]
            notes.write(f"{context.step + 1} {' '.join(str(int(bytes(row))) for row in rows)}\n")
            notes.flush()

    def forward_step(data_iterator: Iterator[dict[str, Any]], model: Any) -> Any:
        batch = next(data_iterator)
        loss = model(batch["tokens"][:, :8], batch["labels"][:, :8], reduction="sum")
        count = batch["labels"][:, :8].ne(-100).sum()
        return loss, lambda loss: (loss, count, {})

    config = tiny_gpt_pretrain_config()
    config.dataset.kind, config.dataset.paths, config.dataset.split = "stream", [url], "100"
    config.dataset.seq_length, config.dataset.num_workers = LENGTH, 2
    config.model.seq_length = LENGTH
    config.model.num_layers, config.model.hidden_size, config.model.num_attention_heads = 1, 16, 2
    config.model.ffn_hidden_size = 16
    config.train.micro_batch_size, config.train.global_batch_size, config.train.train_iters = 8, BATCH, steps
    config.scheduler.lr_warmup_iters, config.checkpoint.save_interval = 0, max(1, steps // 50)
    config.logger.log_interval, config.validation.eval_interval, config.logger.console = (
        max(1, steps // 10),
        None,
        "quiet",
    )
    config.run.output_dir, config.run.name = str(directory), "run"
    pretrain(config, forward_step, callbacks=[Notes()])


@dataclass
class Watched:
    """What was seen of a job while it ran."""

    last_step: int = 0
    was_killed: bool = False
    memory: list[tuple[float, int, int, int]] = field(default_factory=list)
    """Seconds, step, and MiB of the main process of rank 0 and of all processes of the job."""


def run(url: str, steps: int, directory: Path, start: int, ranks: int, kill_at: int | None) -> Watched:
    """Start the ranks; kill all of them at a step, or wait for their end."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    shared = {**os.environ, "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, __file__, "--as-rank", url, str(steps), str(directory), str(start)]
    output = (directory / f"output-{start}").open("w")
    children = [
        subprocess.Popen(
            command,
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        for rank in range(ranks)
    ]
    watched, begin = Watched(), time.monotonic()
    while any(child.poll() is None for child in children):
        watched.last_step = last_step(directory / f"start-{start}-rank-0") or watched.last_step
        sizes = [memory_of(child.pid) for child in children]
        watched.memory.append((time.monotonic() - begin, watched.last_step, sizes[0][0], sum(map(sum, sizes))))
        if kill_at is not None and watched.last_step >= kill_at:
            for child in children:
                os.killpg(child.pid, signal.SIGKILL)
            watched.was_killed = True
            break
        time.sleep(0.1)
    codes = [child.wait() for child in children]
    if not watched.was_killed and any(codes):
        raise SystemExit(f"a rank failed ({codes}):\n{(directory / f'output-{start}').read_text()[-3000:]}")
    return watched


def last_step(path: Path) -> int:
    """The step of the last whole line of a rank's notes; 0 without one."""
    if not path.exists():
        return 0
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - (8 << 10)))
        lines = file.read().split(b"\n")[:-1]
    return int(lines[-1].split()[0]) if lines and lines[-1][:1].isdigit() else 0


def memory_of(pid: int) -> tuple[int, int]:
    """MiB of resident memory of a process, and of its children."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return resident(pid), sum(resident(int(child)) for child in children)
    except (OSError, ValueError):
        return 0, 0


def resident(pid: int) -> int:
    """MiB of resident memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20


def trained_records(directory: Path, starts: int) -> dict[int, list[int]]:
    """The records of each step, as it was trained last."""
    found: dict[int, list[int]] = {}
    for start in range(starts):
        of_start: dict[int, list[int]] = defaultdict(list)
        for path in sorted(directory.glob(f"start-{start}-rank-*")):
            for line in path.read_text().split("\n")[:-1]:
                step, *records = map(int, line.split())
                of_start[step] += records
        found.update(of_start)
    return found


def main() -> None:
    """Run, and print."""
    if sys.argv[1:2] == ["--as-rank"]:
        train(sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]), int(sys.argv[5]))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=8)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="of each start in turn")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    files = max(1, round(options.mib * (1 << 20) / (FILE_RECORDS * LENGTH)))
    steps = files * FILE_RECORDS // BATCH
    print(f"{files} files of {FILE_RECORDS * RECORD_BYTES:,} bytes, {files * FILE_RECORDS:,} records, {steps} steps")
    ports: Any = multiprocessing.get_context("spawn").Queue()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(ports,), daemon=True)
    server.start()
    url = f"http://127.0.0.1:{ports.get()}/{{00000..{files - 1:05d}}}.jsonl"
    kills = sorted(random.Random(options.seed).sample(range(2, steps), options.kills))
    with tempfile.TemporaryDirectory() as above:
        directory = Path(above)
        for start, kill_at in enumerate([*kills, None]):
            ranks = options.ranks[start % len(options.ranks)]
            watched = run(url, steps, directory, start, ranks, kill_at)
            end = f"killed at step {watched.last_step}" if watched.was_killed else "ended"
            print(f"start {start} on {ranks} rank(s): {end} after {watched.memory[-1][0]:.0f} s")
            shown = watched.memory[:: max(1, len(watched.memory) // 10)] if kill_at is None else watched.memory[-2:-1]
            for seconds, step, main_mib, all_mib in shown:
                print(f"  {seconds:6.1f} s  step {step:5d}  rank 0: {main_mib:5d} MiB  all processes: {all_mib:5d} MiB")
        found = trained_records(directory, len(kills) + 1)
        stored = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    server.kill()
    records = [record for step in sorted(found) for record in found[step]]
    missing, twice = files * FILE_RECORDS - len(set(records)), len(records) - len(set(records))
    print(f"{len(kills)} kills; steps {len(found)}; records {len(set(records)):,}; missing {missing}, twice {twice}")
    print(f"files of the run, with its checkpoints: {stored / (1 << 20):.1f} MiB")
    if missing or twice or sorted(found) != list(range(1, steps + 1)):
        raise SystemExit("not every sample once")


if __name__ == "__main__":
    main()
