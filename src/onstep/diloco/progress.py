"""Counts the work of a rank since each fragment's version, and the steps of a cycle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from onstep.diloco.fragments import due

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class Amount:
    """Work done: tokens (or another unit, the same for all workers), and optimizer steps."""

    tokens: float = 0.0
    steps: int = 0

    def __sub__(self, other: Amount) -> Amount:
        return Amount(self.tokens - other.tokens, self.steps - other.steps)


class Progress:
    """Counts steps and tokens, and how many of them each fragment's next submission will contain."""

    def __init__(self, num_fragments: int) -> None:
        self._tokens = 0.0
        self._new_tokens: Tensor | float = 0
        """Since the total was read; float32, which tensors may be, could not hold the tokens of a long run."""
        self._steps = 0
        self._losses: Tensor | float = 0.0
        self._weight: Tensor | float = 0.0
        """Sums of loss times tokens, and of these tokens, since they were taken."""
        self._base = [Amount() for _ in range(num_fragments)]
        self._submitted = [Amount() for _ in range(num_fragments)]

    def count(self, tokens: Tensor | float, steps: int = 1, loss: Tensor | float | None = None) -> None:
        """Add work; a tensor is read only at the next submission."""
        if loss is not None:
            self._losses = self._losses + loss * tokens
            self._weight = self._weight + tokens
        self._new_tokens = self._new_tokens + tokens
        self._steps += steps

    def take_losses(self) -> tuple[float, float]:
        """The sums of loss times tokens, and of tokens, since the last call. Reads them from the device."""
        taken = float(self._losses), float(self._weight)
        self._losses = self._weight = 0.0
        return taken

    def since_base(self, fragment: int) -> Amount:
        """The work that the fragment's next submission will contain. Reads the tokens from the device."""
        return self._total() - self._base[fragment]

    def submit(self, fragment: int) -> Amount:
        """The same; later work is for the submission after this one."""
        amount = self.since_base(fragment)
        self._submitted[fragment] = self._total()
        return amount

    def since_submission(self, fragment: int) -> Amount:
        """The work since the fragment was submitted."""
        return self._total() - self._submitted[fragment]

    def num_steps(self, fragment: int) -> int:
        """The steps that the fragment's next submission will contain."""
        return self._steps - self._base[fragment].steps

    def steps_since_submission(self, fragment: int) -> int:
        """The steps since the fragment was submitted."""
        return self._steps - self._submitted[fragment].steps

    def end_submission(self, fragment: int, is_counted: bool) -> None:
        """The submission has a result; the work of one that was not counted will be part of the next."""
        if is_counted:
            self._base[fragment] = self._submitted[fragment]

    def restore(self, fragment: int, amount: Amount, since_submission: Amount | None = None) -> None:
        """Continue with work that a restored model has done since the fragment's version, and since its submission."""
        self._base[fragment] = self._total() - amount
        if since_submission is not None:
            self._submitted[fragment] = self._total() - since_submission

    def _total(self) -> Amount:
        self._tokens, self._new_tokens = self._tokens + float(self._new_tokens), 0
        return Amount(self._tokens, self._steps)


class Cycle:
    """The steps between two submissions of the same fragment."""

    def __init__(self, length: int, num_fragments: int) -> None:
        self.length, self.step = length, 0
        """Steps of a cycle, and those taken in this one."""
        self._num_fragments = num_fragments

    def advance(self) -> tuple[int, ...]:
        """Take a step; returns the fragments that are due after it."""
        self.step += 1
        return due(self.step, self.length, self._num_fragments)

    def begin(self, length: int) -> None:
        """Begin a cycle of `length` steps."""
        self.step, self.length = 0, length
