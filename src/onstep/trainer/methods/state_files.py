"""Hugging Face's methods that write the states beside the weights."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from onstep.trainer.base_trainer import BaseTrainer
from onstep.trainer.overrides import overrides, replaces

STATE_METHODS = ("_save_optimizer_and_scheduler", "_save_scaler", "_save_rng_state")
"""The methods that write states, in the order in which they are called."""


class StateFileMethods(BaseTrainer):
    """Hugging Face's methods that write states. A run without overrides of them saves without calling them.

    A checkpoint has these states itself, in files of its own. Files as Hugging Face's Trainer writes them are added
    only where an override needs them: one that loads without `super()`, or that writes a checkpoint of its own.
    """

    due_directory: str | None = None
    """The directory of the checkpoint that is being written through a user's methods."""
    left_to_checkpoint: Sequence[Callable[[], None]] = ()
    """What writes the files that the checkpoint makes superfluous."""

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Write `optimizer.pt` and `scheduler.pt`, unless the checkpoint that is due there has these states."""
        self._write(output_dir, "_load_optimizer_and_scheduler", partial(_write_optimizer, self))

    def _save_scaler(self, output_dir: str) -> None:
        """float16's loss scale is saved with the optimizer: this writes nothing."""

    def _save_rng_state(self, output_dir: str) -> None:
        """Write `rng_state.pth`, unless the checkpoint that is due there has this state."""
        self._write(output_dir, "_load_rng_state", partial(_write_generators, self))

    def save_states(self, directory: str) -> None:
        """Call the methods that write states, where a checkpoint is due, if the user's code needs them.

        Args:
            directory: the directory of the checkpoint.
        """
        if not self.args.save_only_model:
            for name, reader in zip(STATE_METHODS, READERS, strict=True):
                if overrides(self, name) or replaces(self, reader):
                    getattr(self, name)(directory)

    def _write(self, output_dir: str, reader: str, write: Callable[[str], None]) -> None:
        is_due = self.due_directory is not None and Path(output_dir).resolve() == Path(self.due_directory).resolve()
        if is_due and not replaces(self, reader):
            self.left_to_checkpoint = [*self.left_to_checkpoint, partial(write, output_dir)]
        else:
            write(output_dir)


READERS = ("_load_optimizer_and_scheduler", "_load_scaler", "_load_rng_state")
"""For each method that writes states, the one that reads them."""


def _write_optimizer(trainer: Any, directory: str) -> None:
    if not trainer.args.should_save:
        return
    os.makedirs(directory, exist_ok=True)
    for name, part in (("optimizer.pt", trainer.optimizer), ("scheduler.pt", trainer.lr_scheduler)):
        if part is not None:
            torch.save(part.state_dict(), os.path.join(directory, name))


def _write_generators(trainer: Any, directory: str) -> None:
    args = trainer.args
    states = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.random.get_rng_state(),
    }
    if torch.cuda.is_available():
        cuda = torch.cuda.random
        states["cuda"] = cuda.get_rng_state_all() if args.parallel_sizes.ranks > 1 else cuda.get_rng_state()
    os.makedirs(directory, exist_ok=True)
    name = "rng_state.pth" if args.parallel_sizes.ranks <= 1 else f"rng_state_{args.process_index}.pth"
    torch.save(states, os.path.join(directory, name))
