"""Kill a run with SIGKILL, start it again, and compare it with a run that nobody killed.

    python examples/kill_and_resume.py

Both runs record a trajectory hash: a chain over the samples, random state, learning rate, loss and weights of every
step. If the last link is equal, so is everything before it. `onstep verify-resume` does this to a job of yours, several
times and at random points.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from onstep import Callback, pretrain
from onstep.config import apply_overrides
from onstep.recipes import tiny_gpt_pretrain_config

STEPS, KILLED_AT = 12, 8


class Kill(Callback):
    """Ends the process as `kill -9` does, without any chance to save."""

    def on_step_end(self, context: Any) -> None:
        if context.step == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)


def train(directory: str, name: str, *, is_killed: bool = False) -> None:
    """Train the run, or continue it."""
    config = tiny_gpt_pretrain_config()
    apply_overrides(
        config,
        [
            f"run.output_dir={directory}",
            f"run.name={name}",
            "tokenizer.tokenizer_type=bytes",
            "model.num_layers=1",
            "model.hidden_size=32",
            "model.hidden_dropout=0.1",
            f"train.train_iters={STEPS}",
            "train.global_batch_size=4",
            "train.micro_batch_size=4",
            "scheduler.lr_warmup_iters=2",
            "logger.log_interval=4",
            "validation.eval_interval=null",
            "validation.eval_iters=1",
            "checkpoint.save_interval=3",
            "checkpoint.certify=true",
        ],
    )
    pretrain(config, callbacks=[Kill()] if is_killed else [])


def chain(directory: str, name: str) -> str:
    """The last link of a run's trajectory hash."""
    records = json.loads(Path(directory, name, "certificate", "chain.json").read_text(encoding="utf-8"))
    return str(records[-1]["chain"])


def compare(directory: str) -> bool:
    """Train both runs; whether they did the same."""
    killed = subprocess.run([sys.executable, __file__, directory], check=False)
    print(f"exit code of the first process: {killed.returncode}, that is, signal {-killed.returncode}")
    train(directory, "killed")
    train(directory, "undisturbed")
    first, second = chain(directory, "killed"), chain(directory, "undisturbed")
    print(f"killed at step {KILLED_AT} and resumed: {first}\nundisturbed:                   {second}")
    return first == second


def main() -> None:
    if len(sys.argv) > 1:  # the process that will be killed
        train(sys.argv[1], "killed", is_killed=True)
        return
    with tempfile.TemporaryDirectory() as directory:
        is_equal = compare(directory)
    print("equal, to the last bit" if is_equal else "DIFFERENT")
    sys.exit(0 if is_equal else 1)


if __name__ == "__main__":
    main()
