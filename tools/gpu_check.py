"""Checks Onstep on a new GPU: `make gpu-check`, about 40 minutes, one GPU.

    python tools/gpu_check.py [--device cpu] [--dry] [--only 7 12] [--output build/gpu-check]

Runs the items in order and stops at nothing: each has a time limit, prints a line (whether it was as expected, seconds,
what it showed), and writes its output to a file. Failures are listed again at the end, and the exit code is then 1.
With `--device cpu` every item runs with small sizes on a CPU, which shows that the check itself works; `--dry` prints
the commands. Python and pytest are those that run this file.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
QUIET = (
    "logger.log_interval=100",
    "validation.eval_interval=null",
    "validation.eval_iters=0",
    "checkpoint.save_interval=null",
)
SMALL = ("model.num_layers=2", "model.hidden_size=32", "model.num_attention_heads=4", "model.seq_length=64")
ON_CPU = (*SMALL, "dataset.seq_length=64", "dist.device=cpu", "scheduler.lr_warmup_iters=2")
BATCH = ("train.micro_batch_size=4", "train.global_batch_size=4")
WITH_GPU_TESTS = (
    *("tests/checkpoint", "tests/callbacks/test_peak_memory.py", "tests/callbacks/test_profiler_callback.py"),
    *("tests/training/test_timers.py", "tests/training/test_stragglers.py", "tests/training/test_energy.py"),
    *("tests/training/test_profiling.py", "tests/training/test_post_step_functions.py"),
    *("tests/distributed/test_world.py", "tests/trainer/test_model_arguments.py"),
)
"""Tests of which some run on a GPU only, besides the files named `*_cuda.py`."""
SHOWN = re.compile(r"=+ (\d.* in [\d.]+s.*) =+|((?:\d+ passed|\d+ skipped|\d+ failed).* in [\d.]+s.*)|"
                   r"(Equal: .*|NOT equal.*|Inconclusive.*)|(MISSED .*|onstep pretrain  .*)|(.*Steps/sec.*)|"
                   r"(\w*Error: .*)|(run \w+: .*, round \d+.*)")  # fmt: skip
"""What is worth a line, of which an item shows the last three."""


@dataclass(frozen=True)
class Item:
    """One command and what is expected of it."""

    number: int
    name: str
    command: tuple[str, ...]
    expected: str
    limit: int
    """Seconds."""
    answer: str = ""
    """A pattern of an output that is expected, whatever the exit code: a line for reading."""
    environment: dict[str, str] = field(default_factory=dict)


def program(name: str, *words: str) -> tuple[str, ...]:
    """A program of `tools/gpu/programs.py`."""
    return (sys.executable, str(ROOT / "tools" / "gpu" / "programs.py"), name, *words)


def onstep(*words: str) -> tuple[str, ...]:
    """A command of Onstep."""
    return (sys.executable, "-m", "onstep", *words)


def pytest(*words: str) -> tuple[str, ...]:
    """Tests, which need the repository as their directory."""
    return (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={ROOT}", *words)


def items(*, is_cpu: bool) -> list[Item]:
    """All items, in order; on a CPU with small sizes."""
    small = ON_CPU if is_cpu else ()
    train = (*BATCH, *QUIET, *small)
    gpu_tests = tuple(str(path) for path in sorted((ROOT / "tests").glob("**/*_cuda.py")))
    more_tests = WITH_GPU_TESTS[1:2] if is_cpu else ("-n", "8", *WITH_GPU_TESTS)
    long = () if is_cpu else ("--recipe", "qwen25_500m")
    iters = "train.train_iters=8" if is_cpu else "train.train_iters=30"
    kills = ("--kills", "1" if is_cpu else "3", iters, "checkpoint.save_interval=2", *small)
    wide = () if is_cpu else ("model.seq_length=1024", "dataset.seq_length=1024", "model.hidden_size=256")
    benchmark = (sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--output", "benchmark")
    tiny = ("--device", "cpu", "--tiny", "--rounds", "1")
    big = () if is_cpu else ("recipe=llama32_1b", *BATCH)
    two = {"TORCH_LOGS": "recompiles,graph_breaks"}
    return [
        Item(1, "versions", program("versions"), "the GPU, its driver and torch", 180),
        Item(2, "tests named *_cuda.py", pytest(*gpu_tests), "all pass", 300),
        Item(3, "tests of which some need a GPU", pytest(*more_tests), "all pass", 600),
        Item(4, "a bfloat16 loss", program("kernel"), "trains, with the kernel or without", 120),
        Item(5, "memory of attention", program("attention"), "the packed layer grows linearly", 120),
        Item(
            6, "packed documents", onstep("train", *long, "train.train_iters=20", *train, "run.name=packed",
            "dataset.reset_attention_mask=true"), "as fast as the next, with as much memory", 240,
        ),
        Item(
            6, "whole sequences", onstep("train", *long, "train.train_iters=20", *train, "run.name=whole",
            "dataset.reset_attention_mask=false"), "for comparison", 240,
        ),
        Item(7, "waits of pretrain", program("sync", *train), "no wait", 120),
        Item(7, "in bf16", program("sync", *train, "mixed_precision=bf16_mixed"), "no wait", 120),
        Item(7, "with experts", program("sync", *train, "model.num_moe_experts=4"), "no wait", 120),
        Item(7, "with experts in bf16", program("sync", *train, "model.num_moe_experts=4",
             "mixed_precision=bf16_mixed"), "no wait", 120),
        Item(7, "with Muon", program("sync", *train, "optimizer.optimizer=muon"), "no wait", 120),
        Item(8, "waits of Trainer", program("sync_trainer"), "no wait", 120),
        Item(9, "GPT-2 beside its peers", (*benchmark, *(tiny if is_cpu else ("--minutes", "8"))),
             "at least 0.99 of the bare loop, no waits", 900),
        Item(9, "a model of 2 layers of 64", (*benchmark, *(tiny if is_cpu else ("--tiny", "--backend", "inductor"))),
             "at least 0.99 of the bare loop, no waits", 600),
        Item(10, "modes of torch.compile", program("graphs", *small), "the losses of no compilation", 600),
        Item(11, "recompilations", program("recompiled", *train), "none", 240, environment=two),
        Item(12, "verify-resume", onstep("verify-resume", *kills), "equal", 300),
        Item(12, "verify-resume in bf16", onstep("verify-resume", *kills, "mixed_precision=bf16_mixed"), "equal", 300),
        Item(12, "verify-resume at length 1024", onstep("verify-resume", *kills, *wide), "equal", 300),
        Item(13, "verify-resume without deterministic algorithms",
             onstep("verify-resume", *kills, *wide, "train.deterministic=false"), "equal or not: for reading", 300,
             answer="Equal:|NOT equal"),
        Item(13, "price of deterministic algorithms", program("price", *train, *wide), "for reading", 300),
        Item(14, "a killed asynchronous save", program("saves", *big, *small), "continues to step 30", 600),
        Item(15, "reports with their graph", program("reports", *train), "memory does not rise", 120),
        Item(16, "fp16 with too large a scale", program("overflow", *train), "the scale falls, nothing is NaN", 120),
        Item(17, "nccl in a world of one", onstep("train", *train, "train.train_iters=5", "run.name=nccl",
             f"dist.distributed_backend={'gloo' if is_cpu else 'nccl'}"), "trains", 120),
        Item(17, "two ranks, and one that raises", program("ranks", *train), "both end, with the traceback", 480),
        Item(18, "peaks of memory", program("peaks"), "the same however often the Trainer logs", 120),
        Item(19, "generation", program("tokens"), "for reading", 180),
        Item(20, "timeline of ten steps", program("timeline", *train, *wide), "kernels run most of the time", 180),
        Item(20, "LoRA on 7B", program("lora"), "for reading: about 14 GiB and activations", 300),
        Item(20, "DiLoCo on one device", program("diloco", *small), "3 rounds", 300),
    ]  # fmt: skip


def shown_of(output: str) -> str:
    """The lines of the output that say something."""
    results = [line.removeprefix("RESULT ") for line in output.splitlines() if line.startswith("RESULT ")]
    found = [next(filter(None, match.groups())).strip() for match in SHOWN.finditer(output)]
    return " | ".join(results or found[-3:])[:300]


def run(item: Item, number: int, output: Path, environment: dict[str, str]) -> bool:
    """Run an item, print its line and write its output; whether it was as expected."""
    started = time.monotonic()
    directory = ROOT if "pytest" in item.command else output
    with (output / f"{number:02d}.log").open("w+") as log:
        print(" ".join(item.command), file=log, flush=True)
        process = subprocess.Popen(
            item.command,
            cwd=directory,
            env={**environment, **item.environment},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(item.limit)
        except subprocess.TimeoutExpired:
            code = None
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.seek(0)
        written = log.read()
        said = shown_of(written)
    seconds = time.monotonic() - started
    is_answered = code is not None and bool(item.answer) and re.search(item.answer, written) is not None
    is_ok = code == 0 or is_answered
    problem = "" if is_ok else f"longer than {item.limit} s; " if code is None else f"exit code {code}; "
    line = f"{'ok' if is_ok else 'FAILED':7}{item.number:>3} {item.name} ({seconds:.0f} s): {problem}{said}"
    print(f"{line}  [expected: {item.expected}; {number:02d}.log]", flush=True)
    return is_ok


def main() -> int:
    """Run the items; 1 if one was not as expected."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dry", action="store_true", help="print the commands only")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of items to run")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "gpu-check", help="directory of the logs")
    options = parser.parse_args()
    chosen = [
        (place, item)
        for place, item in enumerate(items(is_cpu=options.device == "cpu"), start=1)
        if options.only is None or item.number in options.only
    ]
    if options.dry:
        for place, item in chosen:
            print(f"{place:2} [{item.number}] {item.name}, at most {item.limit} s: {' '.join(item.command)}")
        return 0
    output = options.output.resolve() / time.strftime("%Y%m%d-%H%M%S")
    output.mkdir(parents=True)
    paths = (str(ROOT / "src"), os.environ.get("PYTHONPATH", ""))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
    environment["ONSTEP_GPU_CHECK_DEVICE"] = options.device
    print(f"{len(chosen)} commands on {options.device}; their output goes to {output}", flush=True)
    started = time.monotonic()
    failed = [(place, item) for place, item in chosen if not run(item, place, output, environment)]
    print(
        f"\n{len(chosen) - len(failed)} of {len(chosen)} as expected in {(time.monotonic() - started) / 60:.1f} minutes"
    )
    for place, item in failed:
        print(f"FAILED {item.number} {item.name}: expected {item.expected}; see {output / f'{place:02d}.log'}")
        print(f"       {' '.join(item.command)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
