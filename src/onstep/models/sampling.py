"""How the next token is chosen from logits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from onstep.errors import ConfigError


@dataclass(frozen=True)
class Sampling:
    """Repetition penalty, temperature, then top-k, then top-p.

    Raises:
        ConfigError: a value out of its range.

    Source: Holtzman et al., "The Curious Case of Neural Text Degeneration" (2019), section 3.1, for top-p; Keskar et
    al., "CTRL" (2019), section 4.1, for the repetition penalty, with negative scores multiplied as in transformers.
    """

    temperature: float = 1.0
    """Divides the logits; 0 takes the most likely token."""
    top_k: int | None = None
    """Choose among the k most likely tokens; None does not restrict."""
    top_p: float | None = None
    """Choose among the fewest tokens whose probabilities reach p; None does not restrict."""
    repetition_penalty: float = 1.0
    """Scores of tokens that were there already are divided by it (negative ones multiplied); 1 changes nothing."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ConfigError(f"temperature must be a finite number >= 0, got {self.temperature!r}; 0 is greedy.")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k must be >= 1, got {self.top_k!r}; pass None for no restriction.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p must be in (0, 1], got {self.top_p!r}; pass None for no restriction.")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise ConfigError(f"repetition_penalty must be > 0, got {self.repetition_penalty!r}; 1 changes nothing.")

    def choose(self, logits: Tensor, generator: torch.Generator, seen: Tensor | None = None) -> Tensor:
        """One token for each row of `logits` (batch, vocab): (batch, 1), int64.

        `seen` (batch, seq) are the tokens of each row so far, to which the repetition penalty applies.
        """
        if seen is not None and self.repetition_penalty != 1.0:
            logits = _penalize(logits, seen, self.repetition_penalty)
        if self.temperature == 0:
            return logits.argmax(dim=-1, keepdim=True)
        scores = logits.float() / self.temperature
        if self.top_k is not None:
            scores = _keep_top_k(scores, self.top_k)
        if self.top_p is not None:
            scores = _keep_top_p(scores, self.top_p)
        return torch.multinomial(scores.softmax(dim=-1), num_samples=1, generator=generator)


def _penalize(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    scores = logits.gather(-1, seen)
    return logits.scatter(-1, seen, torch.where(scores < 0, scores * penalty, scores / penalty))


def _keep_top_k(scores: Tensor, k: int) -> Tensor:
    smallest_kept = scores.topk(min(k, scores.shape[-1])).values[..., -1:]
    return scores.masked_fill(scores < smallest_kept, -math.inf)


def _keep_top_p(scores: Tensor, p: float) -> Tensor:
    ordered, order = scores.sort(dim=-1, descending=True)
    probabilities = ordered.softmax(dim=-1)
    mass_before = probabilities.cumsum(dim=-1) - probabilities
    kept = ordered.masked_fill(mass_before >= p, -math.inf)
    return torch.empty_like(scores).scatter_(-1, order, kept)
