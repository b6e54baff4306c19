"""What the control of a job costs its training: a quiet callback, a flood of strangers, and curves of a million points.

Run with `python benchmarks/control.py` on a machine with two free cores: the training is pinned to one, the load comes
from another process on the other. Rows and limits:

- "idle": microseconds per step that the training thread spends on commands while none comes, by calling the callback
  directly (limit 5), and by step times of `pretrain` with and without it, interleaved.
- "flood": step time of a CPU-bound loop in the process of a server under load, over that without; interleaved blocks,
  median of the ratios of neighbours, and their quartiles (limit 1.02). "none" shows the noise of the machine; the
  processor time of the server's thread bounds the cost where that is large.
- "curves": milliseconds for 1,000 points of a long curve (limit 50).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from onstep import Callback, CallbackContext, CallbackManager
from onstep.control.feed import Feed
from onstep.control.history import History
from onstep.control.inbox import Inbox
from onstep.control.registry import JobInfo, describe_jobs
from onstep.control.serving.app import build_app
from onstep.control.serving.served_job import LiveJob
from onstep.control.serving.server import ControlServer
from onstep.http.access import Access
from onstep.recipes import tiny_gpt_pretrain_config
from onstep.training import forward_step, pretrain
from step_times import StepTimes

IDLE_LIMIT_US, FLOOD_LIMIT, CURVE_LIMIT_MS = 5.0, 1.02, 50.0
_ATTACKS = ("none", "idle connections", "slow clients", "garbage", "wrong tokens", "all of them")


def main() -> int:
    """Print one table; returns 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="trainings with and without the callback")
    parser.add_argument("--blocks", type=int, default=15, help="pairs of quiet and loaded blocks for each load")
    parser.add_argument("--seconds", type=float, default=1.5, help="length of a block")
    arguments = parser.parse_args()
    num_exceeded = 0
    rows = itertools.chain(_idle(arguments.repeats), _curves(), _flood(arguments.blocks, arguments.seconds))
    for name, shown, limit, holds in rows:
        print(f"{name:<35}  {shown:<66}  {limit:<8}  {'ok' if holds else 'TOO MUCH'}", flush=True)
        num_exceeded += not holds
    return int(num_exceeded > 0)


Row = tuple[str, str, str, bool]
_CACHE = tempfile.TemporaryDirectory()


# --- idle


def _idle(repeats: int) -> Iterator[Row]:
    """What a callback costs that has nothing to do."""
    try:
        from onstep.training.serving.trainer_control_callback import TrainerControlCallback
    except ImportError:
        yield ("idle", "TrainerControlCallback cannot be imported", "", True)
        return
    _training([])
    differences = []
    for _ in range(repeats):
        without = _training([])
        differences.append((_training([TrainerControlCallback(job_id="benchmark")]) - without) * 1e6)
    low, middle, high = statistics.quantiles(differences, n=4)
    direct = _direct_calls(TrainerControlCallback(job_id="benchmark"))
    limit = f"< {IDLE_LIMIT_US:g} us"
    yield ("idle, on_step_end called directly", f"{direct:.2f} us per step", limit, direct < IDLE_LIMIT_US)
    yield ("idle, pretrain with it less without", f"{middle:+.1f} us per step ({low:+.1f} to {high:+.1f})", "", True)


def _training(callbacks: list[Any]) -> float:
    """The median step time of a short training of the smallest model, in seconds."""
    manager, times = CallbackManager(), StepTimes()
    manager.add([*callbacks, times])
    with tempfile.TemporaryDirectory() as directory, _quiet(directory):
        config = tiny_gpt_pretrain_config()
        config.run.output_dir, config.dist.device = directory, "cpu"
        config.train.micro_batch_size = config.train.global_batch_size = 1
        config.model.hidden_size, config.model.num_layers, config.model.num_attention_heads = 16, 1, 2
        config.model.seq_length = config.dataset.seq_length = 16
        config.train.train_iters, config.logger.log_interval = 500, 1000
        config.scheduler.lr_warmup_iters = 0
        config.validation.eval_interval, config.validation.eval_on_start = None, False
        config.checkpoint.save_interval = None
        config.dataset.cache_dir = _CACHE.name
        pretrain(config, forward_step, callbacks=manager)
    return times.median()


def _direct_calls(callback: Any, calls: int = 100_000) -> float:
    """Microseconds per call of `on_step_end`, of a callback in a real training, whose context is kept."""

    class Caller(Callback):
        microseconds = 0.0

        def on_step_end(self, context: CallbackContext) -> None:
            if self.microseconds:
                return
            began = time.perf_counter()
            for _ in range(calls):
                callback.on_step_end(context)
            self.microseconds = (time.perf_counter() - began) / calls * 1e6

    caller = Caller()
    _training([callback, caller])
    return caller.microseconds


@contextlib.contextmanager
def _quiet(directory: str) -> Iterator[None]:
    """Print nothing, and register jobs in this directory."""
    before = os.environ.get("ONSTEP_REGISTRY")
    os.environ["ONSTEP_REGISTRY"] = f"{directory}/r"
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        os.environ.pop("ONSTEP_REGISTRY")
        if before is not None:
            os.environ["ONSTEP_REGISTRY"] = before


# --- flood


def _flood(blocks: int, seconds: float) -> Iterator[Row]:
    """What strangers cost, who have no token and send as much as they can."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[0]})
    torch.set_num_threads(1)
    feed: Feed = Feed()
    jobs: dict[str, LiveJob] = {}
    access = Access("a token that nobody guesses")
    server = ControlServer(build_app(lambda: jobs, access=access, listed=describe_jobs, title="benchmark"), port=0)
    jobs["job"] = LiveJob(JobInfo.of_this_process("job", port=server.port), feed, Inbox())
    server.start()
    step = _step()
    try:
        for attack in _ATTACKS:
            yield _ratio(attack, server.port, step, blocks, seconds, cores[-1])
    finally:
        server.stop()


def _ratio(attack: str, port: int, step: Callable[[], None], blocks: int, seconds: float, core: int) -> Row:
    """Loaded blocks over the mean of the quiet ones before and after, in which the other core works as well."""
    ratios, used, elapsed = [], 0.0, 0.0
    quiet = _block(step, seconds, "none", port, core)
    for _ in range(blocks):
        used, elapsed = used - _server_seconds(), elapsed - time.perf_counter()
        loaded = _block(step, seconds, attack, port, core)
        used, elapsed = used + _server_seconds(), elapsed + time.perf_counter()
        after = _block(step, seconds, "none", port, core)
        ratios.append(loaded / ((quiet + after) / 2))
        quiet = after
    low, middle, high = statistics.quantiles(ratios, n=4)
    holds = attack == "none" or middle < FLOOD_LIMIT
    shown = f"{middle:.3f} x step time ({low:.3f} to {high:.3f}); server {used / elapsed:.1%} of a core"
    return (f"flood, {attack}", shown, f"< {FLOOD_LIMIT:g}", holds)


def _server_seconds() -> float:
    """Processor time of the server's thread so far, with that in the kernel; what it can cost the training at most."""
    idents = [one.ident for one in threading.enumerate() if one.name == "onstep-control-server"]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(one)) for one in idents if one is not None)


def _step() -> Callable[[], None]:
    """A step of some milliseconds that is bound by the CPU, with many small operations as in a training."""
    model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(32, 128)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    for _ in range(50):
        step()
    return step


def _block(step: Callable[[], None], seconds: float, attack: str, port: int, core: int) -> float:
    """The mean step time during so many seconds of a load."""
    with _attacker(attack, port, core):
        began = time.perf_counter()
        for number in itertools.count(1):
            step()
            elapsed = time.perf_counter() - began
            if elapsed >= seconds:
                return elapsed / number
    raise AssertionError


@contextlib.contextmanager
def _attacker(attack: str, port: int, core: int) -> Iterator[None]:
    """A process on another core that is at work."""
    command = [sys.executable, str(Path(__file__).with_name("control_load.py")), attack, str(port), str(core)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield
        finally:
            process.kill()


# --- curves


def _curves() -> Iterator[Row]:
    """How long the server's thread needs for a plot of a long curve."""
    for length in (100_000, 1_000_000):
        history, rng = History(), random.Random(2)
        began = time.perf_counter()
        for step in range(length):
            history.add(step, float(step), {"loss": rng.random()})
        added = (time.perf_counter() - began) / length * 1e6
        times = []
        for _ in range(5):
            began = time.perf_counter()
            history.series(["loss"], 1000)
            times.append((time.perf_counter() - began) * 1e3)
        middle = statistics.median(times)
        shown = f"{middle:.1f} ms for 1,000 points; adding one: {added:.1f} us"
        yield (f"curves, {length:,} points", shown, f"< {CURVE_LIMIT_MS:g} ms", middle < CURVE_LIMIT_MS)


if __name__ == "__main__":
    sys.exit(main())
