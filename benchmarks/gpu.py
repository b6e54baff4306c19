"""Onstep on one GPU beside a bare compiled loop, nanoGPT's, torchtitan's style and Hugging Face's Trainer.

Run with `python benchmarks/gpu.py`: GPT-2 with 124 million parameters, bf16, compiled, ten minutes. No GPU at hand:
`python benchmarks/gpu.py --device cpu --tiny` shows that it works.

- A block is a new run of one row; set-up, compilation and `warmup` steps are not counted. Rows run by turns, and each
  round begins at another row, until the time is used up.
- `ratio` is the median of a row's tokens per second over those of the bare block of the same round.
- `MFU` counts model FLOPs (`onstep.metrics.flops`) against the peak in `onstep.metrics.device_peaks`.
- Waits are counted by PyTorch's profiler over 10 steps in a block of their own: how often the host waited for a stream
  (also in a copy from the device), for an event, and copied from the device. Rows that log read once in these steps.

A row whose package is not installed is named. Figures go to `--output` as `gpu.json` and, for the docs, `gpu.md`.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from gpu_rows import BARE, ROWS, Clock, Row, Workload
from onstep.config import resolve
from onstep.metrics.device_peaks import peak_of
from onstep.metrics.flops import model_flops_utilization
from onstep.recipes import RECIPES
from silence import silence

PACKAGES = {"transformers", "accelerate"}
MIN_RATIO = 0.99
QUIET = ("onstep pretrain", "onstep Trainer")
"""Rows that must be as fast as the bare one, without a wait."""
STREAM_WAITS = ("cudaStreamSynchronize", "cudaMemcpy")
EVENT_WAITS = ("cudaEventSynchronize",)
FROM_DEVICE = ("Memcpy DtoH",)
READS = ("aten::_local_scalar_dense",)
"""Values read one by one; on the CPU the only trace of a wait."""
GIB = 2**30


@dataclass
class Figures:
    """What is known of a row."""

    seconds: list[float] = field(default_factory=list)
    """Of a step, by block."""
    ratios: list[float] = field(default_factory=list)
    """Speed over that of the bare block of the round."""
    peak_bytes: int = 0
    waits: dict[str, int] = field(default_factory=dict)
    """Counts over the profiled steps."""
    problem: str = ""
    """Why there are no figures."""

    @property
    def step(self) -> float:
        """Median seconds of a step."""
        return statistics.median(self.seconds)

    @property
    def ratio(self) -> float:
        """Median ratio; 1 for the bare row."""
        return statistics.median(self.ratios) if self.ratios else 1.0


def run_block(row: Row, clock: Clock, workload: Workload) -> Clock:
    """Train a new model with `row`; returns the clock."""
    torch.compiler.reset()
    gc.collect()
    if workload.device.type == "cuda":
        torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory() as directory, silence():
        row(workload, clock, directory)
    return clock


def measure(workload: Workload, minutes: float, rounds: int | None) -> dict[str, Figures]:
    """All rows, by turns: first a profiled block of each, then rounds while there is time."""
    begin, table = time.monotonic(), {name: Figures() for name in ROWS}
    for name, row in ROWS.items():
        table[name].problem = try_row(name, row, workload, table[name])
    names = [name for name in ROWS if not table[name].problem]
    done, longest = 0, 0.0
    while names and (done < rounds if rounds else time.monotonic() - begin + longest < 60 * minutes or not done):
        started, turn = time.monotonic(), done % len(names)
        seconds: dict[str, float] = {}
        for name in names[turn:] + names[:turn]:
            clock = run_block(ROWS[name], Clock(workload), workload)
            seconds[name] = clock.seconds
            table[name].seconds.append(clock.seconds)
            table[name].peak_bytes = max(table[name].peak_bytes, clock.peak_bytes)
        for name in names:
            if name != BARE and BARE in seconds:
                table[name].ratios.append(seconds[BARE] / seconds[name])
        done, longest = done + 1, max(longest, time.monotonic() - started)
    return table


def try_row(name: str, row: Row, workload: Workload, figures: Figures) -> str:
    """Run a row once, profiled; why it cannot run, or ''."""
    print(f"profiling {name}", file=sys.stderr, flush=True)
    try:
        clock = run_block(row, Clock(workload, profiled=True), workload)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in PACKAGES:
            raise
        return f"not installed: {error.name}"
    except torch.OutOfMemoryError:
        return f"out of memory with --micro-batch {workload.micro_batch}"
    figures.waits = waits_of(clock)
    return ""


def waits_of(clock: Clock) -> dict[str, int]:
    """What the host waited for in the profiled steps."""
    counts: dict[str, int] = defaultdict(int)
    for event in clock.profile.key_averages():
        counts[event.key] += event.count
    kinds = {"stream": STREAM_WAITS, "event": EVENT_WAITS, "from device": FROM_DEVICE, "reads": READS}
    return {kind: sum(count for key, count in counts.items() if key.startswith(names)) for kind, names in kinds.items()}


HEAD = ("", "tokens/s", "ratio", "MFU", "peak GiB", "waits: stream", "event", "from device", "reads", "blocks")


def cells(name: str, figures: Figures, workload: Workload, peak_flops: float | None) -> list[str]:
    """A row of the table."""
    if figures.problem:
        return [name, figures.problem, *[""] * (len(HEAD) - 2)]
    mfu = model_flops_utilization(workload.flops / figures.step, peak_flops)
    return [
        name,
        f"{workload.tokens / figures.step:,.0f}",
        f"{figures.ratio:.3f}",
        "unknown" if mfu is None else f"{mfu:.1%}",
        f"{figures.peak_bytes / GIB:.2f}" if figures.peak_bytes else "-",
        *(str(figures.waits[kind]) for kind in ("stream", "event", "from device", "reads")),
        str(len(figures.seconds)),
    ]


def verdicts(table: dict[str, Figures], device: torch.device) -> list[str]:
    """What a quiet row of Onstep misses; on a CPU nothing is asked for."""
    found = []
    for name in QUIET if device.type == "cuda" else ():
        row = table[name]
        if row.problem or row.ratio < MIN_RATIO:
            found.append(f"{name}: {row.problem or f'{row.ratio:.3f} of the bare loop, below {MIN_RATIO}'}")
        if row.waits.get("stream") or row.waits.get("from device", 0) > row.waits.get("event", 0):
            found.append(f"{name}: {row.waits} in 10 unlogged steps, expected no wait")
    return found


def in_text(rows: list[list[str]]) -> str:
    """The table for a terminal."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    lines = [
        [row[0].ljust(widths[0]), *(one.rjust(w) for one, w in zip(row[1:], widths[1:], strict=True))] for row in rows
    ]
    return "\n".join("  ".join(line).rstrip() for line in lines)


def in_markdown(rows: list[list[str]], title: str) -> str:
    """The table for the docs."""
    head, *body = rows
    lines = [head, ["---", *["---:"] * (len(HEAD) - 1)], *body]
    return f"{title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def workload_of(options: argparse.Namespace) -> Workload:
    """The model and batch that the options and the device's memory allow."""
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device(options.device)
    model = resolve(RECIPES["gpt2_124m"]()).model
    backend = options.backend or ("eager" if options.tiny else "inductor")
    if options.tiny:
        sizes: dict[str, Any] = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 256, "num_attention_heads": 4}
        model = replace(model, **sizes, num_query_groups=4, kv_channels=16, vocab_size=512, seq_length=64)
        return Workload(model, options.micro_batch or 2, device, backend, warmup=2, steps=10)
    micro_batch = options.micro_batch or 4
    if options.micro_batch is None and device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory / GIB
        micro_batch = 16 if memory > 60 else 8 if memory > 30 else 4
    return Workload(model, micro_batch, device, backend, warmup=10, steps=30)


def main() -> int:
    """Measure, print and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--tiny", action="store_true", help="a tiny model, not compiled: shows that the benchmark works"
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="time for everything")
    parser.add_argument("--rounds", type=int, help="rounds to make, whatever they take")
    parser.add_argument("--micro-batch", type=int, help="sequences of a step; default by the device's memory")
    parser.add_argument("--backend", help="of torch.compile; default inductor, with --tiny eager")
    parser.add_argument("--output", type=Path, default=Path("build/gpu"), help="directory of gpu.json and gpu.md")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("torch sees no GPU; use --device cpu --tiny to see that the benchmark works", file=sys.stderr)
        return 1
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    logging.disable(logging.WARNING)
    if options.device == "cpu":
        torch.set_num_threads(1)
    workload = workload_of(options)
    is_cuda = workload.device.type == "cuda"
    name = torch.cuda.get_device_name(workload.device) if is_cuda else "CPU"
    peak = peak_of(name)
    table = measure(workload, options.minutes, options.rounds or (1 if options.tiny else None))
    rows = [list(HEAD)]
    rows += [cells(one, row, workload, None if peak is None else peak.flops_per_second) for one, row in table.items()]
    size = f"{workload.config.num_layers} layers of {workload.config.hidden_size}"
    title = (
        f"{name}, torch {torch.__version__}, {size}, {workload.micro_batch} x {workload.config.seq_length} tokens, bf16"
    )
    missed = verdicts(table, workload.device)
    print(f"{title}\n{in_text(rows)}")
    for line in missed:
        print(f"MISSED {line}")
    options.output.mkdir(parents=True, exist_ok=True)
    figures = {one: asdict(row) for one, row in table.items()}
    known = {"device": name, "torch": torch.__version__, "tokens": workload.tokens, "flops": workload.flops}
    (options.output / "gpu.json").write_text(json.dumps({**known, "rows": figures, "missed": missed}, indent=1) + "\n")
    (options.output / "gpu.md").write_text(in_markdown(rows, title))
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
