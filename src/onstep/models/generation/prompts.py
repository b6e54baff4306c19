"""Continues text prompts with a model: Onstep's own, or one with the `generate` method of `transformers`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from onstep.config.suggestions import nearest
from onstep.distributed.pipeline.whole import pipeline_of
from onstep.errors import ConfigError, warn_once
from onstep.models.generation.generate import Sampling, generate, inner_transformer
from onstep.models.hf.causal_lm import inner_causal_lm

logger = logging.getLogger(__name__)

_OWN_OPTIONS = ("do_sample", "temperature", "top_k", "top_p", "repetition_penalty", "max_new_tokens")
"""Options of `transformers.GenerationConfig` that our own `generate` supports."""
_OWN_NAMES = f"the built-in transformer's: {', '.join(_OWN_OPTIONS)}"


def is_own(model: Any) -> bool:
    """Whether `model` is or wraps a `Transformer` or `CausalLM` of Onstep, or is a stage of a pipeline."""
    finders = (inner_transformer, inner_causal_lm, pipeline_of)
    return isinstance(model, nn.Module) and any(find(model) is not None for find in finders)


def can_generate(model: Any) -> bool:
    """Whether `continue_prompts` supports `model`."""
    return is_own(model) or callable(getattr(model, "generate", None))


def check_options(model: Any, options: Mapping[str, Any]) -> None:
    """Refuse generation options that `model` does not have and, for our transformer, invalid values.

    Raises:
        ConfigError: naming the closest existing option, or the value and its rule.
    """
    known, names = (_OWN_OPTIONS, _OWN_NAMES) if is_own(model) else (_their_options(), "transformers.GenerationConfig")
    for name in options:
        if name not in known:
            raise ConfigError(f"generation option {name!r} is not one of {names}.{nearest(name, list(known))}")
    if not is_own(model):
        return
    length = options.get("max_new_tokens", 1)
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise ConfigError(f"generation option max_new_tokens must be an integer >= 1, got {length!r}.")
    try:
        Sampling(**_sampling_of(options))
    except TypeError as error:
        raise ConfigError(f"generation options must be numbers, got {dict(options)!r}: {error}.") from error


def _their_options() -> list[str]:
    """The options of a `transformers.GenerationConfig`, which would silently accept and ignore unknown names."""
    from transformers import GenerationConfig

    return [name for name in vars(GenerationConfig()) if not name.startswith("_")]  # type: ignore[no-untyped-call]


@torch.no_grad()
def continue_prompts(
    model: Any, tokenizer: Any, prompts: Sequence[str], options: Mapping[str, Any], max_new_tokens: int, seed: int
) -> list[tuple[str, str]]:
    """Pairs of prompt and continuation (without the prompt); repeated prompts with `num_return_sequences`.

    A `transformers` model draws from torch's global RNG, which is seeded here; the caller must restore it. Onstep's
    models do not. No model sees more tokens than it was trained on: a text that becomes longer is truncated at its
    beginning.

    Args:
        model: a model for which `can_generate` is true.
        tokenizer: a tokenizer of `onstep.data` or of `transformers`.
        options: arguments of `transformers.GenerationConfig`; our own transformer supports sampling and length only.
        max_new_tokens: used unless set in `options`.
        seed: the same seed gives the same texts.

    Raises:
        ConfigError: for an option that our own transformer does not support.
    """
    check_options(model, options)
    options = {"max_new_tokens": max_new_tokens, **options}
    rows = [encode_prompt(tokenizer, prompt) for prompt in prompts]
    continue_rows = _continue_with_ours if is_own(model) else _continue_with_theirs
    texts = continue_rows(model, tokenizer, rows, options, seed)
    return [(prompts[number * len(prompts) // len(texts)], text) for number, text in enumerate(texts)]


def encode_prompt(tokenizer: Any, prompt: str) -> list[int]:
    """Ids of a prompt; an empty prompt becomes the token that begins a text."""
    if hasattr(tokenizer, "encode_text"):
        ids = list(tokenizer.encode_text(prompt))
    else:
        ids = list(tokenizer(prompt)["input_ids"])
    return ids or [_first_of(getattr(tokenizer, "bos_token_id", None), eos_of(tokenizer), 0)]


def decode_new(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of generated ids, up to the end token."""
    eos = eos_of(tokenizer)
    kept = list(ids[: ids.index(eos)]) if eos in ids else list(ids)
    if hasattr(tokenizer, "encode_text"):
        return str(tokenizer.decode(kept))
    return str(tokenizer.decode(kept, skip_special_tokens=True))


def eos_of(tokenizer: Any) -> int | None:
    """The token that ends a text; None if the tokenizer has none."""
    eos: int | None = getattr(tokenizer, "eos_id", getattr(tokenizer, "eos_token_id", None))
    return eos


def left_padded(rows: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask, (batch, longest) int64, with rows padded on the left."""
    longest = max(map(len, rows))
    ids = [[pad_id] * (longest - len(row)) + list(row) for row in rows]
    mask = [[0] * (longest - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(ids), torch.tensor(mask)


def _continue_with_ours(
    model: nn.Module, tokenizer: Any, rows: Sequence[list[int]], options: dict[str, Any], seed: int
) -> list[str]:
    """Continue prompts one at a time: they differ in length, and our cache does not support padding."""
    texts, of_model = [], getattr(model, "generation_config", None)  # a stage of a model of transformers has it
    ends = eos_of(tokenizer) if (own := getattr(of_model, "eos_token_id", None)) is None else own
    for number, row in enumerate(rows):
        out = generate(
            model,
            torch.tensor([row], device=_device_of(model)),
            max_new_tokens=options["max_new_tokens"],
            seed=seed + number,
            eos_id=ends,
            **_sampling_of(options),
        )
        texts.append(decode_new(tokenizer, out[0, len(row) :].tolist()))
    return texts


def _sampling_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Translate options of `transformers` into arguments of `Sampling`."""
    names = ("temperature", "top_k", "top_p", "repetition_penalty")
    sampling = {name: options[name] for name in names if options.get(name) is not None}
    if not options.get("do_sample", False):
        sampling["temperature"] = 0.0
    if sampling.get("top_k") == 0:  # no restriction, as in transformers
        del sampling["top_k"]
    return sampling


def _continue_with_theirs(
    model: Any, tokenizer: Any, rows: Sequence[list[int]], options: dict[str, Any], seed: int
) -> list[str]:
    """Continue all prompts in one batch; a text longer than the model's positions in pieces, each within them."""
    length, positions = options["max_new_tokens"], _positions_of(model)
    piece = length if positions is None or length < positions else max(1, positions // 4)
    texts, new = list(rows), [list[int]() for _ in rows]
    _warn_of_cut(rows, positions, piece)
    torch.manual_seed(seed)
    for done in range(0, length, piece):
        count = min(piece, length - done)
        added = _new_ids(model, tokenizer, _fitting(texts, positions, count), {**options, "max_new_tokens": count})
        of = [number * len(texts) // len(added) for number in range(len(added))]  # with num_return_sequences
        texts = [texts[number] + ids for number, ids in zip(of, added, strict=True)]
        new = [new[number] + ids for number, ids in zip(of, added, strict=True)]
        options = {**options, "num_return_sequences": 1}
    return [decode_new(tokenizer, ids) for ids in new]


def _new_ids(model: Any, tokenizer: Any, rows: list[list[int]], options: dict[str, Any]) -> list[list[int]]:
    """The ids that the model adds to each row; the batch is padded on the left."""
    from transformers import GenerationConfig

    eos = eos_of(tokenizer)
    pad = _first_of(getattr(tokenizer, "pad_token_id", None), eos, 0)
    options = {"pad_token_id": pad, "use_cache": True, **options}
    if eos is not None and getattr(getattr(model, "generation_config", None), "eos_token_id", None) is None:
        options.setdefault("eos_token_id", eos)
    ids, mask = left_padded(rows, pad)
    device = _device_of(model)
    config = GenerationConfig(**options)  # type: ignore[no-untyped-call]
    out = model.generate(input_ids=ids.to(device), attention_mask=mask.to(device), generation_config=config)
    added: list[list[int]] = out[:, ids.shape[1] :].tolist()
    return added


def _positions_of(model: Any) -> int | None:
    """The number of positions of a `transformers` model; None if its configuration does not say."""
    positions: int | None = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    return positions


def _fitting(rows: Sequence[list[int]], positions: int | None, num_new: int) -> list[list[int]]:
    """The rows, truncated at the beginning if the model lacks positions for them and the new tokens."""
    return list(rows) if positions is None or positions <= num_new else [row[num_new - positions :] for row in rows]


def _warn_of_cut(rows: Sequence[list[int]], positions: int | None, num_new: int) -> None:
    num_cut = 0 if positions is None else sum(len(row) + num_new > positions for row in rows)
    if positions is not None and num_cut:
        warn_once(
            logger,
            f"{num_cut} of {len(rows)} prompts are longer than the {positions - num_new} tokens that "
            f"max_new_tokens={num_new} leaves of {positions} positions; they are cut at their beginning",
        )


def _device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _first_of(*values: int | None) -> int:
    return next(value for value in values if value is not None)
