"""Counts the Python calls that a logged step makes beyond an unlogged one, by function.

Run with `python benchmarks/logged_step.py`, or with `--all` for all functions. A GPT of one layer trains on the CPU as
`onstep train` starts it (derived metrics, rows on the console, a record), with the csv tracker. Calls are those of
Python functions on the training's thread; each resumption of a generator is one.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections import Counter
from io import StringIO
from pathlib import Path
from types import FrameType
from typing import Any

import onstep
from onstep import DefaultMetrics, ProgressCallback
from onstep.config import ConfigContainer
from onstep.recipes import tiny_gpt_pretrain_config
from onstep.training import forward_step, pretrain

LIMIT = 150
"""Calls into the package."""
WARMUP, INTERVAL, INTERVALS = 20, 5, 8
SHOWN = 10
PACKAGE = str(Path(onstep.__file__).parent) + "/"

Place = tuple[str, str]
"""File and function."""


class CallCounter:
    """A forward step that counts calls from each of its calls to the next, separately for logged and other steps."""

    def __init__(self) -> None:
        self.logged: Counter[Place] = Counter()
        self.others: Counter[Place] = Counter()
        self._num_steps = 0
        self._calls: Counter[Place] = Counter()

    def __call__(self, *arguments: Any) -> Any:
        step, self._num_steps = self._num_steps, self._num_steps + 1
        if step == WARMUP + INTERVAL * INTERVALS:
            sys.setprofile(None)
        elif WARMUP <= step < WARMUP + INTERVAL * INTERVALS:
            self._calls = self.others if self._num_steps % INTERVAL else self.logged
            sys.setprofile(self._profile)
        return forward_step(*arguments)

    def _profile(self, frame: FrameType, event: str, argument: object) -> None:
        place = frame.f_code.co_filename, frame.f_code.co_qualname
        if event == "call" and place[0] != __file__:
            self._calls[place] = self._calls.get(place, 0) + 1

    def difference(self) -> dict[Place, float]:
        """Calls of a logged step less those of another one, by function, most first."""
        others = INTERVALS * (INTERVAL - 1)
        both = {one: self.logged[one] / INTERVALS - self.others[one] / others for one in self.logged | self.others}
        return dict(sorted(((one, number) for one, number in both.items() if number), key=lambda item: -item[1]))


def configuration() -> ConfigContainer:
    """A run of few milliseconds a step that is logged at every fifth."""
    config = tiny_gpt_pretrain_config()
    config.dist.device = "cpu"
    config.model.num_layers, config.model.hidden_size, config.model.num_attention_heads = 1, 32, 2
    config.model.seq_length = config.dataset.seq_length = 32
    config.train.global_batch_size = config.train.micro_batch_size = 2
    config.train.train_iters, config.scheduler.lr_warmup_iters = WARMUP + INTERVAL * INTERVALS + 1, 0
    config.logger.log_interval, config.logger.report_to = INTERVAL, ["csv"]
    config.validation.eval_interval, config.validation.eval_on_start = None, False
    config.run.name, config.checkpoint.save_interval = "run", None
    return config


def calls_of_a_logged_step() -> dict[Place, float]:
    """The calls of a logged step less those of another one, in a new directory; nothing is printed."""
    counter, before = CallCounter(), sys.getprofile()
    with (
        tempfile.TemporaryDirectory() as directory,
        contextlib.chdir(directory),
        contextlib.redirect_stdout(StringIO()),
    ):
        try:
            pretrain(configuration(), counter, callbacks=[DefaultMetrics(), ProgressCallback(level="verbose")])
        finally:
            sys.setprofile(before)
    return counter.difference()


def of_package(calls: dict[Place, float]) -> dict[Place, float]:
    """Those of the package's functions, by file in the package."""
    own = {place: number for place, number in calls.items() if place[0].startswith(PACKAGE)}
    return {(file.removeprefix(PACKAGE), function): number for (file, function), number in own.items()}


def main() -> int:
    """Print the calls, the files and the largest contributors; returns 1 if there are too many calls."""
    calls = calls_of_a_logged_step()
    own = of_package(calls)
    total, files = sum(own.values()), {file for file, _ in own}
    print(f"a logged step makes {total:.1f} more calls into the package than another step, <= {LIMIT}")
    print(f"in {len(files)} files, and {sum(calls.values()) - total:.1f} more into libraries")
    for (file, function), number in list(calls.items())[: None if "--all" in sys.argv else SHOWN]:
        print(f"{number:8.2f}  {file.removeprefix(PACKAGE).rpartition('/site-packages/')[2]} {function}")
    return int(total > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
