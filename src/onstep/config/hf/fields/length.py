"""Declares the arguments for the length of a run, its batches and its seeds."""

from __future__ import annotations

from dataclasses import dataclass

from onstep.config.hf.argument import argument, declares_arguments


@declares_arguments
@dataclass(kw_only=True)
class LengthArguments:
    """The length of a run, its batches and its seeds."""

    per_device_train_batch_size: int = 8
    """Samples of one forward pass on one rank."""
    gradient_accumulation_steps: int = argument(1, bound="> 0")
    """Micro-batches of a step on each rank."""
    num_train_epochs: float = 3.0
    """Epochs; a fraction of an epoch is rounded up to a step. Has no effect if `max_steps` > 0."""
    max_steps: int = -1
    """Optimizer steps, where > 0."""
    seed: int = 42
    data_seed: int | None = argument(None)
    do_train: bool = False
    """For your own script, like `do_eval` and `do_predict`: a Trainer does what its methods are called for."""
    do_predict: bool = False
    """Whether the user's script predicts; no method reads it."""
