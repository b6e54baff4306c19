"""Text from a model: one token after the other, each added to what the next one sees."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from onstep.errors import ConfigError
from onstep.models.layers.sequence_context import KeyValueCache, check_positions
from onstep.models.modes import kept_modes
from onstep.models.transformer import Transformer


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
            known, penalty = logits.gather(-1, seen), self.repetition_penalty
            logits = logits.scatter(-1, seen, torch.where(known < 0, known * penalty, known / penalty))
        if self.temperature == 0:
            return logits.argmax(dim=-1, keepdim=True)
        scores = logits.float() / self.temperature
        if self.top_k is not None:
            smallest_kept = scores.topk(min(self.top_k, scores.shape[-1])).values[..., -1:]
            scores = scores.masked_fill(scores < smallest_kept, -math.inf)
        if self.top_p is not None:
            scores = _keep_top_p(scores, self.top_p)
        return torch.multinomial(scores.softmax(dim=-1), num_samples=1, generator=generator)


def _keep_top_p(scores: Tensor, p: float) -> Tensor:
    ordered, order = scores.sort(dim=-1, descending=True)
    probabilities = ordered.softmax(dim=-1)
    mass_before = probabilities.cumsum(dim=-1) - probabilities
    kept = ordered.masked_fill(mass_before >= p, -math.inf)
    return torch.empty_like(scores).scatter_(-1, order, kept)


@torch.no_grad()
def generate(
    model: nn.Module,
    tokens: Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float = 1.0,
    seed: int | None = None,
    eos_id: int | None = None,
) -> Tensor:
    """Continue `tokens`, using a key/value cache (not beyond `config.seq_length` with dynamic rope scaling).

    Runs in evaluation mode and gives the model back as it was, also after an error. Torch's global RNG is neither
    read nor changed. No collective: of a wrapped model (DDP, compiled) the inner one runs, so one rank may call it
    alone. Nothing slides: positions beyond `config.seq_length` go on with all earlier ones in view, though the model
    never trained there; only learned positions end there.

    Args:
        model: a `Transformer`, or a wrapper of one.
        tokens: (batch, seq), int64; prompts of one length, at least one token.
        max_new_tokens: most tokens to add.
        temperature: divides the logits; 0 always takes the most likely token.
        top_k: choose among the k most likely tokens.
        top_p: choose among the fewest tokens whose probabilities reach p.
        repetition_penalty: above 1, tokens of the prompt and of the text so far become less likely.
        seed: the same seed gives the same tokens; None is different each time.
        eos_id: token that ends a sequence. It is repeated after the end until all sequences of the batch have ended.

    Returns:
        (batch, seq + new), int64: the prompt and up to `max_new_tokens` after it.

    Raises:
        ConfigError: a value out of its range, more positions than a model with learned ones has, a model that ends in
            a value head, or one without a `Transformer` in it.
    """
    transformer = inner_transformer(model)
    if transformer is None:
        raise ConfigError(
            f"generate needs an onstep Transformer, got {type(model).__name__}; pass a Transformer or a wrapper of one."
        )
    if tokens.dim() != 2 or tokens.shape[1] == 0:
        raise ConfigError(
            f"tokens must be (batch, seq) with at least one token a sequence, got shape {tuple(tokens.shape)}; "
            "start an empty prompt with the end-of-text token."
        )
    if max_new_tokens < 0:
        raise ConfigError(f"max_new_tokens must be >= 0, got {max_new_tokens}.")
    if transformer.has_value_head:
        raise ConfigError(
            "the model ends in a value head, which gives no scores of tokens to choose from; generate with a model "
            "that has its language-model head."
        )
    if transformer.position_embedding is not None:
        check_positions(transformer.position_embedding, tokens.shape[1] + max_new_tokens)
    sampling = Sampling(temperature, top_k, top_p, repetition_penalty)
    generator = torch.Generator(device=tokens.device)
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    with kept_modes([transformer]):
        transformer.eval()
        return _continue(transformer, tokens, max_new_tokens, sampling, generator, eos_id)


def inner_transformer(model: nn.Module) -> Transformer | None:
    """The `Transformer` inside wrappers such as DistributedDataParallel; None where there is none."""
    return next((module for module in model.modules() if isinstance(module, Transformer)), None)


def _continue(
    model: Transformer,
    tokens: Tensor,
    max_new_tokens: int,
    sampling: Sampling,
    generator: torch.Generator,
    eos_id: int | None,
) -> Tensor:
    batch, prompt_length = tokens.shape
    out = tokens.new_empty(batch, prompt_length + max_new_tokens)
    out[:, :prompt_length] = tokens
    cache = KeyValueCache(model.config.num_layers, capacity=out.shape[1])
    has_ended = torch.zeros(batch, 1, dtype=torch.bool, device=tokens.device)
    for end in range(prompt_length, out.shape[1]):
        if model.rotary is None or model.rotary.keeps_angles(end):
            hidden = model.hidden_states(out[:, cache.length : end], cache)
        else:  # dynamic scaling: each token changes what all layers make of those before it
            hidden = model.hidden_states(out[:, :end])
        chosen = sampling.choose(model.logits(hidden[:, -1]), generator, out[:, :end])
        if eos_id is not None:
            chosen = chosen.masked_fill(has_ended, eos_id)
            has_ended |= chosen == eos_id
        out[:, end : end + 1] = chosen
        if eos_id is not None and has_ended.all():
            return out[:, : end + 1].clone()
    return out
