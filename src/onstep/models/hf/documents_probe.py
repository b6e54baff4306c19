"""Finds out whether and how a family of `transformers` keeps packed documents apart, by trying it on a small copy."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from onstep.config import ModelConfig
from onstep.errors import ConfigError
from onstep.models.hf.causal_lm import CausalLM, Separation
from onstep.models.hf.family_directory import GENERATION, build_causal_lm, one_line, their_config

TOLERANCE = 1e-5
"""Largest difference of a logit, relative to the largest one, at which packed documents count as separate ones."""
_LENGTHS = ((7, 12, 5), (3, 1, 20))
"""Lengths of the documents in two packed sequences; some are longer than the window of the copy."""
_VOCABULARY, _LAYERS, _HEAD, _WIDTH = 64, 8, 8, 64
_MOST_PARAMETERS = 50_000_000
_WINDOWS = {"sliding_window": 5, "attention_chunk_size": 6}
_LAYER_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_WIDTHS = re.compile(
    r"(?:\w+_)?(?:hidden_size|hidden_dim|intermediate_size|embedding_size|head_dim|lora_rank|d_head)(?:_\w+)?"
    r"|d_model|n_embd|n_inner|ffn_dim|ffn_hidden_size|d_ff|lru_width|rotary_dim|word_embed_proj_dim|time_step_rank"
)
_ROPE_LISTS = ("short_factor", "long_factor")


@dataclass(frozen=True)
class Finding:
    """What a family does with documents."""

    is_causal: bool
    """Whether a token's logits do not depend on later tokens."""
    separation: Separation | None
    """How documents are kept apart; None if they are not."""
    difference: float
    """Largest difference of a logit between a packed document and the same alone, relative to the largest logit."""


def probe(config: ModelConfig) -> Finding:
    """Try packed documents on a small copy of the model of `config`, on the CPU; the same on every rank.

    Raises:
        ConfigError: if no small copy can be built.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = small_copy(config).eval()
        _sharpen(model)
        rows = torch.randint(1, _VOCABULARY, (len(_LENGTHS), sum(_LENGTHS[0])))
        changed = rows.clone()
        changed[:, -1] = (changed[:, -1] + 1) % _VOCABULARY
        is_causal = _distance(model(rows)[:, :-1], model(changed)[:, :-1]) <= TOLERANCE
        alone = [
            torch.cat([model(document[None])[0] for document in row.split(lengths)])
            for row, lengths in zip(rows, map(list, _LENGTHS), strict=True)
        ]
        least = math.inf
        for separation in Separation:
            least = min(least, found := _difference(model, separation, rows, torch.stack(alone)))
            if found <= TOLERANCE:
                return Finding(is_causal, separation, found)
    return Finding(is_causal, None, least)


def prepare_for_data(model: CausalLM, *, has_documents: bool, seq_length: int) -> None:
    """Choose how `model` is called, in place, and refuse data that it cannot be trained on.

    Args:
        has_documents: whether sequences hold several documents that must not see each other.
        seq_length: tokens of a sequence.

    Raises:
        ConfigError: if its tokens see later ones; if it would let documents see each other, or compute them otherwise
            than alone; for more tokens than it has learned positions.
    """
    kind = (model.config.hf_config or {}).get("model_type")
    _check_positions(model, seq_length)
    try:
        found = probe(model.config)
    except ConfigError as error:
        if has_documents:
            raise ConfigError(f"whether {kind} can pack documents cannot be tried ({error}); {_REMEDY}.") from error
        return
    if not found.is_causal:
        raise ConfigError(
            f"models of the type {kind} see later tokens, so they cannot learn to predict the next one; set is_decoder "
            f"to true in config.json, or use a causal language model."
        )
    if not has_documents:
        return
    if found.separation is None:
        raise ConfigError(
            f"models of the type {kind} do not keep packed documents apart (their logits differ by "
            f"{found.difference:.0e} from those of documents alone); {_REMEDY}."
        )
    limit = _length_of_fixed_scales(their_config(model.config).get_text_config())
    if limit is not None and seq_length > limit:
        raise ConfigError(
            f"beyond {limit} tokens this {kind} computes a document otherwise in a packed sequence than alone, and "
            f"dataset.seq_length={seq_length}; {_REMEDY}, or dataset.seq_length={limit}."
        )
    model.separation = found.separation


_REMEDY = "set dataset.packing=false (kind=chat) or dataset.reset_attention_mask=false (other kinds)"


def _check_positions(model: CausalLM, seq_length: int) -> None:
    """Refuse sequences that are longer than a table of learned positions."""
    text = model.model.config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    embedding = model.model.get_input_embeddings()
    tables = [one for one in model.modules() if isinstance(one, nn.Embedding) and one is not embedding]
    if limit and seq_length > limit and any(limit <= one.num_embeddings <= limit + _PADDED for one in tables):
        raise ConfigError(
            f"model.seq_length={seq_length} must be at most {limit}: the model has that many learned positions; set "
            f"model.seq_length and dataset.seq_length."
        )


_PADDED = 8
"""Rows that a table of learned positions may have besides, such as those of OPT."""


def _difference(model: CausalLM, separation: Separation, rows: Tensor, alone: Tensor) -> float:
    model.separation = separation
    ids = torch.stack([torch.arange(len(one)).repeat_interleave(torch.tensor(one)) for one in _LENGTHS])
    positions = torch.stack([torch.cat([torch.arange(length) for length in one]) for one in _LENGTHS])
    try:
        return _distance(model(rows, position_ids=positions, document_ids=ids), alone)
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError, NotImplementedError):
        return math.inf  # it does not accept such inputs


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max().clamp(min=1e-30))


def _sharpen(model: CausalLM) -> None:
    """Draw matrices so large that what a token sees has weight."""
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2 and name.endswith("weight") and "conv" not in name:
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5)


def small_copy(config: ModelConfig) -> CausalLM:
    """A model of the same family and options, but of few layers and small width.

    Raises:
        ConfigError: if `transformers` cannot build it, and the model itself is large.
    """
    whole = dict(config.hf_config or {})
    content = json.loads(their_config(config).to_json_string(use_diff=False))
    reason = ""
    for shrink in (_shrunk(content), _fewer(content), None):
        small = replace(config, hf_config=_without_generation(whole if shrink is None else shrink))
        try:
            if _num_parameters(small) > _MOST_PARAMETERS:
                continue
            model = build_causal_lm(small)
            model.eval()(torch.ones(1, 4, dtype=torch.long))
        except (ConfigError, TypeError, ValueError, RuntimeError, IndexError, AttributeError, KeyError) as error:
            reason = reason or one_line(error)
            continue
        return model
    raise ConfigError(f"no small copy can be built: {reason or 'it is too large'}")


def _num_parameters(config: ModelConfig) -> int:
    with torch.device("meta"):
        return build_causal_lm(config, is_empty=True).num_parameters()


def _without_generation(content: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in content.items() if name != GENERATION}


def _shrunk(content: dict[str, Any]) -> dict[str, Any]:
    """With all widths divided by the same number, which keeps what divides what."""
    fewer = _fewer(content)
    widths = [value for name, value in _numbers(fewer) if _WIDTHS.fullmatch(name)]
    factor = 1
    while widths and min(_head_of(fewer), *widths) >= 2 * factor * _HEAD and max(widths) > factor * _WIDTH:
        if any(width % (2 * factor) for width in widths):
            break
        factor *= 2
    return _changed(fewer, lambda name, value: _narrower(name, value, factor))


def _narrower(name: str, value: Any, factor: int) -> Any:
    if isinstance(value, int) and not isinstance(value, bool) and _WIDTHS.fullmatch(name):
        return value // factor
    if name in _ROPE_LISTS and isinstance(value, list):
        return value[: len(value) // factor]
    if name == "mrope_section" and isinstance(value, list):
        return [max(1, one // factor) for one in value]
    return value


def _head_of(content: dict[str, Any]) -> int:
    """Width of an attention head, or the hidden size of a model without heads."""
    text = content.get("text_config") or content
    found = dict(_numbers(text))
    hidden = found.get("hidden_size") or found.get("n_embd") or found.get("d_model") or _WIDTH
    return int(found.get("head_dim") or hidden // (found.get("num_attention_heads") or found.get("n_head") or 1))


def _fewer(content: dict[str, Any]) -> dict[str, Any]:
    """With few layers, tokens and experts, and windows shorter than the documents that are tried."""
    found = dict(content)
    layers = next((found[key] for key in _LAYER_KEYS if isinstance(found.get(key), int)), None)
    if layers is not None:
        lists = [one for one in found.values() if isinstance(one, list) and len(one) == layers]
        kept = max([min(layers, _LAYERS), *map(_prefix_with_all, lists)])
        found = {name: one[:kept] if any(one is each for each in lists) else one for name, one in found.items()}
        found |= {key: kept for key in _LAYER_KEYS if isinstance(found.get(key), int)}
    for name, value in found.items():
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if name in _WINDOWS and is_number and value > 0:
            found[name] = min(value, _WINDOWS[name])
        elif "vocab_size" in name and is_number:
            found[name] = _VOCABULARY
        elif name.endswith("token_id") and is_number and value >= _VOCABULARY:
            found[name] = 0
        elif isinstance(value, dict):
            found[name] = _fewer(value)
    return found


def _prefix_with_all(kinds: list[Any]) -> int:
    """Length of the shortest beginning in which each kind of layer occurs."""
    return 1 + max(map([repr(one) for one in kinds].index, {repr(one) for one in kinds}))


def _numbers(content: dict[str, Any]) -> Iterator[tuple[str, int]]:
    for name, value in content.items():
        if isinstance(value, dict):
            yield from _numbers(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            yield name, value


def _changed(content: dict[str, Any], change: Callable[[str, Any], Any]) -> dict[str, Any]:
    return {
        name: _changed(value, change) if isinstance(value, dict) else change(name, value)
        for name, value in content.items()
    }


def _length_of_fixed_scales(text: Any) -> int | None:
    """The length from which angles or scores depend on the whole batch, beyond what the copy tries; None for never."""
    if getattr(text, "attn_temperature_tuning", False) and getattr(text, "floor_scale", None):
        return int(text.floor_scale) - 1
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    kinds = [one for one in (rope, *rope.values()) if isinstance(one, dict)]
    if not any(one.get("rope_type", one.get("type")) in ("dynamic", "longrope") for one in kinds):
        return None
    known = [one.get("original_max_position_embeddings") for one in kinds]
    named = [getattr(text, name, None) for name in ("original_max_position_embeddings", "max_position_embeddings")]
    return next((int(one) for one in (*known, *named) if one), None)
