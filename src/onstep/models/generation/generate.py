"""Generates text from a model autoregressively, with temperature, top-k, top-p and repetition penalty."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from onstep.config import ModelConfig
from onstep.distributed.pipeline.whole import pipeline_of
from onstep.distributed.shards import usable_shards
from onstep.errors import ConfigError
from onstep.models.generation.context_window import ContextWindow, context_length
from onstep.models.hf.causal_lm import CausalLM, inner_causal_lm
from onstep.models.hf.stages import scores_of_stages
from onstep.models.hf.stages_probe import keeps_states
from onstep.models.layers.sequence_context import KeyValueCache
from onstep.models.stages import TransformerStage
from onstep.models.transformer import Transformer

_WHOLE = 2**40
"""A probability of 1, in integers."""
_MOST_POSITIONS = 2**31
"""For a model that does not say how many it was trained on."""


@dataclass(frozen=True)
class Sampling:
    """Samples tokens by applying repetition penalty, temperature, top-k and top-p, in this order.

    Raises:
        ConfigError: for a value out of range.

    Source: Holtzman et al., "The Curious Case of Neural Text Degeneration" (2019), section 3.1, for top-p; Keskar et
    al., "CTRL" (2019), section 4.1, for the repetition penalty, with negative scores multiplied as in transformers.
    """

    temperature: float = 1.0
    """Divides the logits; 0 selects the most likely token."""
    top_k: int | None = None
    """Sample from the k most likely tokens; None for no restriction."""
    top_p: float | None = None
    """Sample from the smallest set of tokens with total probability >= p; None for no restriction."""
    repetition_penalty: float = 1.0
    """Divides the scores of tokens that already occurred (multiplies negative ones); 1 has no effect."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ConfigError(f"temperature must be a finite number >= 0, got {self.temperature!r}; use 0 for greedy.")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k must be >= 1, got {self.top_k!r}; pass None for no restriction.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p must be in (0, 1], got {self.top_p!r}; pass None for no restriction.")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise ConfigError(f"repetition_penalty must be > 0, got {self.repetition_penalty!r}; 1 disables it.")

    def choose(self, logits: Tensor, generator: torch.Generator, seen: Tensor | None = None) -> Tensor:
        """Choose one token for each row of `logits` (batch, vocab): (batch, 1), int64.

        `seen` (batch, seq) holds the tokens of each row so far, to which the repetition penalty applies.
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
    # in integers: exact, and torch may refuse sums of floats on a GPU with `train.deterministic`
    probabilities = (ordered.softmax(dim=-1) * _WHOLE).long()
    mass_before = probabilities.cumsum(dim=-1) - probabilities
    kept = ordered.masked_fill(mass_before >= int(p * _WHOLE), -math.inf)
    return torch.empty_like(scores).scatter_(-1, order, kept)


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
    eos_id: int | Collection[int] | None = None,
) -> Tensor:
    """Continue `tokens`, using a key/value cache (except beyond `config.seq_length` with dynamic rope scaling).

    Runs in evaluation mode and restores the model's mode, also after an error. Torch's global RNG is neither read nor
    changed. Not collective: for a wrapped model (DDP, compiled) the inner module is called, so a single rank may call
    this. But all ranks that divide a model must, with the same arguments, those of a pipeline with a stage of theirs;
    they get the same tokens. The model sees no more tokens than it was trained on (`context_length`): the window slides
    over a text that becomes longer, whatever its positions are.

    Args:
        model: a `Transformer` or a `CausalLM`, or a wrapper of one; in a pipeline any stage of this rank.
        tokens: (batch, seq), int64; prompts of equal length, at least one token.
        max_new_tokens: maximum number of tokens to add.
        temperature: divides the logits; 0 always selects the most likely token.
        top_k: sample from the k most likely tokens; None from all.
        top_p: sample from the smallest set of tokens with total probability >= p; None from all.
        repetition_penalty: above 1, tokens of the prompt and of the text so far become less likely.
        seed: the same seed gives the same tokens; None differs each time.
        eos_id: token that ends a sequence, or several; None for none. It, or the first of them, is repeated until all
            sequences of the batch have ended.

    Returns:
        (batch, seq + new), int64: the prompt followed by up to `max_new_tokens` tokens.

    Raises:
        ConfigError: for a value out of range, a model with a value head, or one that does not contain such a model.
    """
    sampling = Sampling(temperature, top_k, top_p, repetition_penalty)
    new = stream_tokens(model, tokens, sampling, max_new_tokens=max_new_tokens, seed=seed, eos_id=eos_id)
    return torch.cat([tokens, *new], dim=1)


def stream_tokens(
    model: nn.Module,
    tokens: Tensor,
    sampling: Sampling,
    *,
    max_new_tokens: int,
    seed: int | None = None,
    eos_id: int | Collection[int] | None = None,
) -> Iterator[Tensor]:
    """The tokens that `generate` adds, (batch, 1) each, as soon as they are chosen.

    The model is in evaluation mode until the iterator ends or is closed.

    Raises:
        ConfigError: as for `generate`, before the first token is asked for.
    """
    inner = inner_transformer(model) or inner_causal_lm(model) or _staged(model)
    if inner is None:
        raise ConfigError(
            f"generate requires an Onstep Transformer, got {type(model).__name__}; pass a Transformer or a wrapped one."
        )
    if tokens.dim() != 2 or tokens.shape[1] == 0:
        raise ConfigError(
            f"tokens must be (batch, seq) with at least one token per sequence, got shape {tuple(tokens.shape)}; "
            "start an empty prompt with the end-of-text token."
        )
    if max_new_tokens < 0:
        raise ConfigError(f"max_new_tokens must be >= 0, got {max_new_tokens}.")
    if isinstance(inner, Transformer) and inner.has_value_head:
        raise ConfigError(
            "the model ends in a value head, which does not score tokens; generate with a model that has a "
            "language-model head."
        )
    generator = torch.Generator(device=tokens.device)
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    ends = [eos_id] if isinstance(eos_id, int) else list(eos_id or ())
    return _continue(inner, model, tokens, max_new_tokens, sampling, generator, ends)


def _staged(stage: Any) -> CausalLM | None:
    """The model of transformers that a module is a stage of, as it generates; None if it is none."""
    pipeline = pipeline_of(stage)
    if pipeline is None:
        return None
    positions = getattr(stage.config, "max_position_embeddings", None) or _MOST_POSITIONS
    config = ModelConfig(hf_config=stage.config.to_dict(), vocab_size=stage.config.vocab_size, seq_length=positions)
    whole: Any = CausalLM(config, stage)
    whole.pipeline = pipeline
    return whole  # type: ignore[no-any-return]


def representative(model: Any) -> Any:
    """The model; of the stages of a pipeline that a rank has, the first, which generates with all of them."""
    return model[0] if isinstance(model, list) else model


def inner_transformer(model: nn.Module) -> Transformer | None:
    """The `Transformer` inside wrappers such as DistributedDataParallel; None if there is none."""
    return next((module for module in model.modules() if isinstance(module, Transformer)), None)


def _continue(
    model: Transformer | CausalLM,
    wrapper: nn.Module,
    tokens: Tensor,
    max_new_tokens: int,
    sampling: Sampling,
    generator: torch.Generator,
    ends: Sequence[int],
) -> Iterator[Tensor]:
    batch, prompt_length = tokens.shape
    text = tokens.new_empty(batch, prompt_length + max_new_tokens)
    text[:, :prompt_length] = tokens
    reader = _WindowReader(model, text) if isinstance(model, Transformer) else _CausalReader(model, text)
    has_ended = torch.zeros(batch, 1, dtype=torch.bool, device=tokens.device)
    parts = _parts_of(model)
    with preserve_modes(parts), usable_shards([wrapper, *parts]):
        for part in parts:
            part.eval()
        for end in range(prompt_length, text.shape[1]):
            with torch.no_grad():  # not around the whole loop, whose consumer runs between its steps
                chosen = sampling.choose(reader.next_logits(end), generator, text[:, :end])
            if ends:
                chosen = chosen.masked_fill(has_ended, ends[0])
            for end_id in ends:
                has_ended |= chosen == end_id
            text[:, end : end + 1] = chosen
            yield chosen
            if ends and has_ended.all():
                return


def _parts_of(model: nn.Module) -> list[nn.Module]:
    """The model, or all stages that this rank has of it."""
    pipeline = pipeline_of(model)
    return [model] if pipeline is None else pipeline.chunks


class _WindowReader:
    """Reads a growing text through a sliding window, each token once as long as the window rests.

    Args:
        text: (batch, capacity), int64, filled by the caller.
    """

    def __init__(self, model: Transformer, text: Tensor) -> None:
        self._model = model
        self._text = text
        self._window = ContextWindow(context_length(model.config))
        self._capacity = min(self._window.length, text.shape[1])
        self._cache = self._empty_cache()

    def next_logits(self, end: int) -> Tensor:
        """The scores of token `end` (batch, vocab), given those before it that are in the window."""
        if self._window.include(end):
            self._cache = self._empty_cache()  # what is left has other positions and sees less
        start = self._window.start
        rotary = self._model.rotary
        if rotary is None or rotary.keeps_angles(end - start):
            return self._scores(self._text[:, start + self._cache.length : end], self._cache)
        return self._scores(self._text[:, start:end])  # dynamic scaling: a new token changes all earlier rotations

    def _scores(self, tokens: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        if isinstance(self._model, TransformerStage):
            return self._model.next_scores(tokens, cache)
        return self._model.logits(self._model.hidden_states(tokens, cache)[:, -1])

    def _empty_cache(self) -> KeyValueCache:
        return KeyValueCache(self._model.config.num_layers, self._capacity)


class _CausalReader:
    """Reads a growing text with a class of `transformers`, as `_WindowReader` does with Onstep's model."""

    def __init__(self, model: CausalLM, text: Tensor) -> None:
        self._model = model
        self._text = text
        self._window = ContextWindow(context_length(model.config))
        self._known = 0
        """The tokens whose keys and values, or states, are in the cache."""
        self._cache: dict[Any, Any] = {}
        self._keeps_states = pipeline_of(model) is None or keeps_states(model.config)

    def next_logits(self, end: int) -> Tensor:
        """The scores of token `end` (batch, vocab), given those before it that are in the window."""
        if self._window.include(end) or not self._cache:
            self._known, self._cache = self._window.start, {}
        pipeline = pipeline_of(self._model)
        if pipeline is not None:
            start, caches = (self._known, self._cache) if self._keeps_states else (self._window.start, None)
            self._known = end
            return scores_of_stages(pipeline, self._text[:, start:end], self._model.config, caches)
        output = self._model.model(input_ids=self._text[:, self._known : end], use_cache=True, **self._cache)
        kept = {name: getattr(output, name, None) for name in ("past_key_values", "cache_params")}
        self._cache = {name: cache for name, cache in kept.items() if cache is not None}
        self._known = end
        scores: Tensor = output.logits[:, -1]
        return scores


@contextmanager
def preserve_modes(models: Iterable[nn.Module]) -> Iterator[None]:
    """Restore the mode of every submodule on exit, also after an error; frozen ones may differ from the rest."""
    modes = {module: module.training for model in models for module in model.modules()}
    try:
        yield
    finally:
        for module, was_training in modes.items():
            module.training = was_training
