"""Measures how long training waits for its saves: in a local directory, and mirrored in a store, by turns.

    AWS_ENDPOINT_URL=... python benchmarks/store_waits.py --url s3://bucket/benchmark --hidden 512 --turns 3

Both save asynchronously, and a step is a pause, as if a GPU computed: what is measured is the time between two steps in
which a checkpoint is saved, and how much longer all steps last than without any save.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

from onstep import Callback, pretrain
from onstep.events.context import CallbackContext
from onstep.recipes import tiny_gpt_pretrain_config

STEPS, INTERVAL = 60, 6
PAUSE_SECONDS = 0.25


class Gaps(Callback):
    """Lets a step last a while, and measures the time from the end of each step to the beginning of the next one."""

    def __init__(self) -> None:
        self.seconds: dict[int, float] = {}
        """By the step that has ended."""
        self.began = self.ended = self._left = 0.0
        self._step = 0

    def on_step_begin(self, context: CallbackContext) -> None:
        """Note the gap, and pause."""
        now = time.perf_counter()
        if self._step:
            self.seconds[self._step] = now - self._left
        self.began = self.began or now
        time.sleep(PAUSE_SECONDS)

    def on_step_end(self, context: CallbackContext) -> None:
        """Note the time."""
        self._step += 1
        self._left = self.ended = time.perf_counter()

    @property
    def waits(self) -> list[float]:
        """Seconds of the gaps with a save, but the first one, which makes the buffers, and the last one."""
        return [seconds for step, seconds in self.seconds.items() if step % INTERVAL == 0][1:]


def main() -> None:
    """Print the waits of both, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="a place in a store for this measurement alone")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    waits: dict[str, list[float]] = {"local": [], "store": []}
    lasted: dict[str, list[float]] = {"local": [], "store": []}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(given.turns):
            for where in ("local", "store") if turn % 2 == 0 else ("store", "local"):
                gaps = train(where, Path(folder), f"{where}-{os.getpid()}-{turn}", given)
                waits[where] += gaps.waits
                lasted[where].append(gaps.ended - gaps.began)
                print(f"{where}: {_milliseconds(gaps.waits)} a save, {lasted[where][-1]:.2f} s in all", flush=True)
    local, store = (statistics.median(waits[where]) for where in ("local", "store"))
    all_local, all_store = (statistics.median(lasted[where]) for where in ("local", "store"))
    print(f"median wait for a save: local {local * 1e3:.1f} ms, store {store * 1e3:.1f} ms, ratio {store / local:.2f}")
    print(f"median of all steps: local {all_local:.2f} s, store {all_store:.2f} s, ratio {all_store / all_local:.3f}")


def train(where: str, folder: Path, name: str, given: argparse.Namespace) -> Gaps:
    """A run that saves asynchronously."""
    config, gaps = tiny_gpt_pretrain_config(), Gaps()
    config.run.name, config.run.scratch_dir = name, str(folder / "scratch")
    config.run.output_dir = given.url if where == "store" else str(folder / "runs")
    config.run.save_weights, config.model.hidden_size, config.model.num_layers = False, given.hidden, 2
    config.train.train_iters, config.train.global_batch_size, config.train.micro_batch_size = STEPS, 1, 1
    config.scheduler.lr_warmup_iters, config.validation.eval_interval = 1, 10 * STEPS
    config.checkpoint.save_interval, config.checkpoint.async_save = INTERVAL, True
    config.checkpoint.most_recent_k, config.checkpoint.certify = 2, False
    pretrain(config, callbacks=[gaps])
    return gaps


def _milliseconds(waits: list[float]) -> str:
    return f"{statistics.median(waits) * 1e3:.1f} ms"


if __name__ == "__main__":
    main()
