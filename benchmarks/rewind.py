"""What repeating steps of the past costs, beside training them: `python benchmarks/rewind.py`.

A run is trained without a checkpoint before its last step. By turns, the same is trained again, and rewound to its last
step; set-up and the first two steps are not counted: the clock starts at the third step and stops at the last. Seconds
are those of the processor, with one thread of torch. Then the losses and gradients of the step's samples are measured,
as `Past.samples` does before it looks for their texts, beside one forward and backward pass of each sample by hand.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import onstep
from onstep import Callback, pretrain
from onstep.config import ConfigContainer
from onstep.past.samples import SampleLosses
from onstep.recipes import tiny_gpt_pretrain_config
from onstep.training import forward_step

FIRST = 3
"""The first step that is counted."""
ROWS = 4


class Clock(Callback):
    """Processor seconds from the beginning of one step to the same place of a later one."""

    def __init__(self, last: int) -> None:
        self._last, self._begin, self.seconds = last, 0.0, 0.0

    def on_train_step_start(self, context: Any) -> None:
        """Start or stop."""
        if context.step + 1 == FIRST:
            self._begin = time.process_time()
        if context.step + 1 == self._last:
            self.seconds = time.process_time() - self._begin


def configuration(output_dir: Path, steps: int, width: int) -> ConfigContainer:
    """The run."""
    config = tiny_gpt_pretrain_config()
    config.run.output_dir, config.run.name = str(output_dir), "x"
    config.model.hidden_size, config.model.ffn_hidden_size, config.model.num_attention_heads = width, 4 * width, 4
    config.train.train_iters = FIRST - 1 + steps
    config.train.micro_batch_size = config.train.global_batch_size = ROWS
    config.checkpoint.save_interval = None
    config.validation.eval_interval, config.logger.log_interval = None, 10
    return config


def trained(config: ConfigContainer, clock: Clock) -> float:
    """Seconds of the steps when they are trained, or trained again."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        pretrain(config, forward_step, callbacks=[clock])
    return clock.seconds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("onstep").setLevel(logging.ERROR)
    last = FIRST - 1 + options.steps
    ratios, sample_ratios, per_step = [], [], []
    with tempfile.TemporaryDirectory() as above:
        config = configuration(Path(above), options.steps, options.width)
        trained(config, Clock(last))
        run = Path(above) / "x"
        for number in range(options.rounds):
            again = configuration(Path(above) / f"again-{number}", options.steps, options.width)
            seconds = trained(again, Clock(last))
            begun = Clock(last)
            with onstep.rewind(run, last, callbacks=[begun]) as past:
                ratios.append(begun.seconds / seconds)
                per_step.append(seconds / (options.steps - 1))
                measure = SampleLosses(past.job, past.current, past.random_state).measure
                measure()
                start = time.process_time()
                measure()
                measured = time.process_time() - start
                parameters = [one for one in past.model.parameters() if one.requires_grad]
                start = time.process_time()
                for row in range(ROWS):
                    loss = past.model(past.batch["tokens"][row : row + 1], past.batch["labels"][row : row + 1])
                    torch.autograd.grad(loss.sum(), parameters)
                sample_ratios.append(measured / (time.process_time() - start))
    print(f"steps of {1000 * statistics.median(per_step):.1f} ms, {options.steps - 1} of them, {options.rounds} rounds")
    for name, found, most in (("rewinding / training", ratios, 1.05), ("samples / passes by hand", sample_ratios, 1.2)):
        low, middle, high = min(found), statistics.median(found), max(found)
        print(f"{name:26} {middle:.3f}  ({low:.3f} to {high:.3f})  <= {most} {'ok' if middle <= most else 'MISSED'}")


if __name__ == "__main__":
    main()
