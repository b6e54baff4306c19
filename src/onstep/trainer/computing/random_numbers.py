"""Draws from the global random generators where Hugging Face's Trainer does, so that dropout has the same masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from onstep.checkpoint import RngState
from onstep.data import EvalLoader, Loader, StepSource
from onstep.training.setup.setup import seed_everything


def draw_for_workers() -> None:
    """Draw the number that torch's DataLoader draws as the seed of its workers whenever a pass over it begins."""
    torch.empty((), dtype=torch.int64).random_()


def draws_each_epoch(source: StepSource, loader: object = None) -> StepSource:
    """The training data, which from now on draws for its workers when an epoch begins, like torch's DataLoader.

    Args:
        loader: the user's, if the data comes from one; it draws from its own generator, if it has one.
    """
    reads_users_batches = isinstance(source, Loader) and source.compared_by == "micro-batches"
    if isinstance(source, Loader) and not reads_users_batches and getattr(loader, "generator", None) is None:
        source.before_epoch = draw_for_workers
    return source


def draw_for_evaluation(loader: EvalLoader) -> None:
    """Draw for the workers of an evaluation; a user's loader of batches that cannot be listed does so itself."""
    if loader.compared_by != "micro-batches":
        draw_for_workers()


class StartOfTraining:
    """The random numbers that a training begins with: those that the script has left behind.

    Every `train()` of a Trainer begins with those of its first, so that it can be repeated. With `model_init`, or
    another seed than the constructor's, they follow from the seed.
    """

    def __init__(self, seed: int) -> None:
        seed_everything(seed)
        self._seed = seed
        self._states: dict[str, Any] | None = None

    def remember(self) -> None:
        """Keep the generators' states as the start, at the first call."""
        if self._states is None:
            self._states = RngState().state_dict()

    def model_made(self, make: Callable[[], Any], seed: int) -> Any:
        """The model that `make` draws from the seed; the training begins with what follows."""
        seed_everything(seed)
        model = make()
        self._seed, self._states = seed, RngState().state_dict()
        return model

    def apply(self, seed: int, rank: int, *, on_every_rank: bool = False) -> None:
        """Set the generators to the start; without `on_every_rank`, other ranks than the first have their own numbers.

        What a script leaves behind on every rank are numbers of one seed, unless it seeds the ranks differently itself.
        """
        seed_everything(seed + rank)
        if (rank == 0 or on_every_rank) and seed == self._seed and self._states is not None:
            RngState().load_state_dict(self._states)
