"""Text from a model: one token after the other, each added to what the next one sees."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from onstep.errors import ConfigError
from onstep.models.cache import KeyValueCache
from onstep.models.positions import check_positions
from onstep.models.sampling import Sampling
from onstep.models.transformer import Transformer


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
    transformer = unwrap(model)
    _check_request(tokens, max_new_tokens)
    _check_model(transformer, tokens.shape[1] + max_new_tokens)
    sampling = Sampling(temperature, top_k, top_p, repetition_penalty)
    with _evaluation_mode(transformer):
        return _continue(transformer, tokens, max_new_tokens, sampling, _new_generator(tokens.device, seed), eos_id)


def unwrap(model: nn.Module) -> Transformer:
    """The `Transformer` inside wrappers such as DistributedDataParallel.

    Raises:
        ConfigError: there is none.
    """
    for module in model.modules():
        if isinstance(module, Transformer):
            return module
    raise ConfigError(
        f"generate needs an onstep Transformer, got {type(model).__name__}; pass a Transformer or a wrapper of one."
    )


def _check_request(tokens: Tensor, max_new_tokens: int) -> None:
    if tokens.dim() != 2 or tokens.shape[1] == 0:
        raise ConfigError(
            f"tokens must be (batch, seq) with at least one token a sequence, got shape {tuple(tokens.shape)}; "
            "start an empty prompt with the end-of-text token."
        )
    if max_new_tokens < 0:
        raise ConfigError(f"max_new_tokens must be >= 0, got {max_new_tokens}.")


def _check_model(model: Transformer, length: int) -> None:
    if model.has_value_head:
        raise ConfigError(
            "the model ends in a value head, which gives no scores of tokens to choose from; generate with a model "
            "that has its language-model head."
        )
    if model.position_embedding is not None:
        check_positions(model.position_embedding, length)


def _new_generator(device: torch.device, seed: int | None) -> torch.Generator:
    generator = torch.Generator(device=device)
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return generator


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Every submodule in evaluation mode, and afterwards each in the mode it had (a frozen one may have its own)."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


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
