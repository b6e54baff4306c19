"""Jobs that train on a stream, and note the records of each step."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from onstep import Callback, pretrain
from onstep.config import ConfigContainer
from onstep.recipes import tiny_gpt_pretrain_config

LENGTH, BATCH = 32, 6


def line_of(number: int) -> bytes:
    """A record of `LENGTH` tokens."""
    return b'{"text": "%015d%s"}\n' % (number, b"x" * (LENGTH - 16))


class Notes(Callback):
    """Writes the records of each step before it is trained; ends the process after step `kill_at`."""

    def __init__(self, path: Path, kill_at: int) -> None:
        self._path = path
        self._kill_at = kill_at

    def on_train_step_start(self, context: Any) -> None:
        rows = [row for batch in context.micro_batches for row in batch["tokens"][:, :15].tolist()]
        with self._path.open("a") as file:
            file.write(f"{context.step + 1} {' '.join(str(int(bytes(row))) for row in rows)}\n")

    def on_step_end(self, context: Any) -> None:
        if context.step == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


def run_config(path: str, directory: Path, steps: int) -> ConfigContainer:
    """A run `x` in a directory."""
    config = tiny_gpt_pretrain_config()
    config.dataset.kind, config.dataset.paths, config.dataset.split = "stream", [path], "100"
    config.dataset.seq_length = config.model.seq_length = LENGTH
    config.dataset.stream_window_bytes = 500
    config.model.num_layers, config.model.hidden_size, config.model.num_attention_heads = 1, 8, 1
    config.train.micro_batch_size, config.train.global_batch_size = 1, BATCH
    config.train.train_iters, config.checkpoint.save_interval = steps, 3
    config.scheduler.lr_warmup_iters, config.validation.eval_interval = 0, None
    config.run.output_dir, config.run.name = str(directory), "x"
    return config


def job_trained(settings: dict[str, Any]) -> None:
    """Train or continue the run in `runs`."""
    config = run_config(settings["url"], Path(settings["runs"]), settings["steps"])
    config.dataset.num_workers = settings["num_workers"]
    notes = Path(settings["runs"]) / f"start-{settings['start']}-rank-{os.environ.get('RANK', '0')}"
    pretrain(config, callbacks=[Notes(notes, settings["kill_at"])])
