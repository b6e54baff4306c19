"""Trains a tiny GPT with DiLoCo and compares its validation loss with that of data-parallel training on as many tokens.

Run with `python benchmarks/diloco_training.py` (about ten minutes on two free cores). All trainings begin with the
weights of one that was data-parallel for `--warm-steps` steps, as those of the paper do (Douillard et al. 2023, DiLoCo,
section 3: from 24,000 steps on); 0 begins with random weights. The learning rate is a third of the recipe's, as is
usual for weights that are trained further. Both matter: with 16 rounds from here, and `--lr 3e-3`, the ratio is 1.05,
and 1.3 from random weights. Rows:

- "data parallel": one process with the global batch of all workers, which is what data-parallel ranks compute.
- one for each codec: a server and as many worker processes, over real sockets on this machine, each with its share of
  the data; submissions and updates are both in that codec. "loss" is the final validation loss of the model that the
  workers have in common, "of data parallel" its ratio (limit 1.02, int4 1.04), "sent" the bytes that one worker sends,
  bodies and registration, "fewer" how many times less that is than a data-parallel rank sends with a ring all-reduce:
  `2 (n - 1) / n` times the gradients in float32 at each step (limit 100; of fp32 at H = 50 it is at most 75).

`--record FILE` writes the rows as JSON.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import SGD, Optimizer

from onstep import TrainerCallback, pretrain
from onstep.callbacks import DiLoCoCallback
from onstep.config import ConfigContainer
from onstep.data import build_tokenizer
from onstep.diloco.protocol.messages import Settings
from onstep.diloco.server import DiLoCoServer
from onstep.diloco.server.initial import initial_parameters
from onstep.models import build_transformer
from onstep.recipes import tiny_gpt_pretrain_config
from onstep.training.setup.setup import resolve_vocabulary

CODECS = ("fp32", "bf16", "int8", "int4")
WARM_LR = 3e-3
"""The recipe's."""
LIMITS = {"fp32": 1.02, "bf16": 1.02, "int8": 1.02, "int4": 1.04}


@dataclass(frozen=True)
class Size:
    """How much is trained."""

    steps: int = 800
    warm_steps: int = 400
    """Of the training that all others continue from, each with new optimizers and a new schedule."""
    workers: int = 4
    sync_every: int = 50
    batch: int = 8
    """Sequences of one worker and step."""
    lr: float = 1e-3
    """Peak of the inner learning rate, of the data-parallel training as well."""
    layers: int = 4
    width: int = 128
    length: int = 128
    eval_iters: int = 40
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    paths: tuple[str, ...] = ()
    """The text; empty for the default corpus."""


@dataclass(frozen=True)
class Row:
    """One training."""

    name: str
    loss: float
    ratio: float
    sent_bytes: float
    """By one worker."""
    fewer: float
    seconds: float
    quantization_error: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.name:<14} {self.loss:8.4f} {self.ratio:17.4f} {self.sent_bytes / 1e6:11.2f} MB {self.fewer:8.1f}x "
            f"{self.quantization_error:10.2e} {self.seconds:8.0f} s"
        )


HEADER = f"{'':<14} {'loss':>8} {'of data parallel':>17} {'sent':>14} {'fewer':>9} {'error':>10} {'took':>10}"


def config_of(size: Size, directory: Path, workers: int) -> ConfigContainer:
    """Of a training with the global batch of so many workers, in a directory of its own."""
    config = tiny_gpt_pretrain_config()
    config.run.output_dir, config.run.name = str(directory), "run"
    config.train.train_iters = size.steps
    config.train.global_batch_size = size.batch * workers
    config.model.num_layers, config.model.hidden_size = size.layers, size.width
    config.model.seq_length = config.dataset.seq_length = size.length
    config.optimizer.lr, config.optimizer.min_lr = size.lr, size.lr / 10
    config.scheduler.lr_warmup_iters = max(1, size.steps // 20)
    config.dataset.paths = list(size.paths) or config.dataset.paths
    config.validation.eval_interval, config.validation.eval_iters = size.steps, size.eval_iters
    config.validation.eval_on_start = False
    config.validation.eval_global_batch_size = config.validation.eval_micro_batch_size = size.batch
    config.checkpoint.save_interval = None
    config.logger.console = "quiet"
    config.dist.device = "cpu"
    return config


class Notes(TrainerCallback):
    """Keeps the metrics of the worker, which are gone when training has ended, and the last validation loss."""

    def __init__(self, diloco: DiLoCoCallback | None = None) -> None:
        self.metrics: dict[str, Any] = {}
        self.loss = float("nan")
        self._diloco = diloco

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._diloco is not None and self._diloco.worker is not None:
            self.metrics = {**vars(self._diloco.worker.metrics)}

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        self.loss = float(metrics["eval_loss"])


def warm_start(size: Size, directory: Path) -> Path | None:
    """The checkpoint that all trainings begin with; None for random weights."""
    if not size.warm_steps:
        return None
    config = config_of(replace(size, steps=size.warm_steps), directory, size.workers)
    config.optimizer.lr, config.optimizer.min_lr = WARM_LR, WARM_LR / 10
    state = pretrain(config)
    assert state.run_dir is not None
    return state.run_dir.checkpoints / f"checkpoint-{size.warm_steps}"


def data_parallel(size: Size, directory: Path, num_parameters: int, begin: Path | None) -> Row:
    """The reference."""
    start, notes = time.monotonic(), Notes()
    config = config_of(size, directory, size.workers)
    if begin is not None:
        config.checkpoint.pretrained_checkpoint = str(begin)
    pretrain(config, callbacks=[notes])
    sent = 2 * (size.workers - 1) / size.workers * 4 * num_parameters * size.steps
    return Row("data parallel", notes.loss, 1.0, sent, 1.0, time.monotonic() - start)


def train_worker(size: Size, directory: Path, index: int, address: str, token: str) -> None:
    """One worker, in a process of its own; writes what it found beside its run."""
    os.environ["DILOCO_TOKEN"] = token
    callback = DiLoCoCallback(address, worker_id=f"worker-{index}")
    notes = Notes(callback)
    pretrain(config_of(size, directory / str(index), 1), callbacks=[callback, notes])
    (directory / f"{index}.json").write_text(json.dumps({"loss": notes.loss, **notes.metrics}))


def diloco(size: Size, directory: Path, codec: str, reference: Row, begin: Path | None) -> Row:
    """A training by several workers."""
    start, token = time.monotonic(), secrets.token_hex(16)
    settings = Settings(num_workers=size.workers, min_workers=size.workers, sync_every=size.sync_every, codec=codec)

    def outer(parameters: list[Tensor]) -> Optimizer:
        momentum = size.outer_momentum
        return SGD(parameters, lr=size.outer_lr, momentum=momentum, nesterov=momentum > 0)

    model = new_model(size, directory) if begin is None else initial_parameters(begin)
    with DiLoCoServer(model, settings=settings, outer_optimizer_factory=outer, port=0, token=token) as server:
        context = multiprocessing.get_context("spawn")
        workers = [
            context.Process(target=train_worker, args=(size, directory, index, server.address, token))
            for index in range(size.workers)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    if any(worker.exitcode for worker in workers):
        raise SystemExit(f"a worker failed: exit codes {[worker.exitcode for worker in workers]}")
    found = [json.loads((directory / f"{index}.json").read_text()) for index in range(size.workers)]
    losses = {one["loss"] for one in found}
    if len(losses) != 1:
        raise SystemExit(f"the workers do not have the same model: their losses are {sorted(losses)}")
    sent = max(one["total_send_bytes"] for one in found)
    return Row(
        codec,
        losses.pop(),
        found[0]["loss"] / reference.loss,
        sent,
        reference.sent_bytes / sent,
        time.monotonic() - start,
        max(one["quantization_error"] for one in found),
    )


def new_model(size: Size, directory: Path) -> Any:
    """The model as all trainings begin with it."""
    config = config_of(size, directory, 1)
    resolve_vocabulary(config, build_tokenizer(config.tokenizer, warns=False).vocab_size)
    return build_transformer(config.model, seed=config.rng.seed)


def compare(size: Size, codecs: Sequence[str]) -> list[Row]:
    """The rows, printed as they come."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        parameters = sum(one.numel() for one in new_model(size, directory).parameters())
        print(
            f"{parameters:,} parameters, {size.workers} workers, {size.steps} steps after {size.warm_steps}, "
            f"H = {size.sync_every}\n{HEADER}"
        )
        begin = warm_start(size, directory / "warm")
        rows = [data_parallel(size, directory / "reference", parameters, begin)]
        print(rows[0], flush=True)
        for codec in codecs:
            (directory / codec).mkdir()
            rows.append(diloco(size, directory / codec, codec, rows[0], begin))
            print(rows[-1], flush=True)
    return rows


def main() -> int:
    """Print the table; the exit code is 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=Size.steps)
    parser.add_argument("--warm-steps", type=int, default=Size.warm_steps)
    parser.add_argument("--workers", type=int, default=Size.workers)
    parser.add_argument("--sync-every", type=int, default=Size.sync_every)
    parser.add_argument("--lr", type=float, default=Size.lr)
    parser.add_argument("--outer-lr", type=float, default=Size.outer_lr)
    parser.add_argument("--outer-momentum", type=float, default=Size.outer_momentum)
    parser.add_argument("--codecs", nargs="*", default=CODECS)
    parser.add_argument("--record", type=Path)
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    size = Size(
        given.steps,
        given.warm_steps,
        given.workers,
        given.sync_every,
        lr=given.lr,
        outer_lr=given.outer_lr,
        outer_momentum=given.outer_momentum,
    )
    rows = compare(size, given.codecs)
    if given.record:
        given.record.write_text(json.dumps([asdict(row) for row in rows], indent=2))
    failed = [row.name for row in rows[1:] if row.ratio > LIMITS[row.name] or (row.name != "fp32" and row.fewer < 100)]
    print(f"above its limit: {', '.join(failed)}" if failed else "all within their limits")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
