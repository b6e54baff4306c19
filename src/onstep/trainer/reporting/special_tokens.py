"""Gives a model the special tokens of the tokenizer that it is trained with."""

from __future__ import annotations

import logging

from torch import nn

logger: logging.Logger = logging.getLogger(__name__)

_NAMES = ("eos_token_id", "bos_token_id", "pad_token_id")


def align_special_tokens(model: nn.Module, processing_class: object, *, logs: bool = True) -> dict[str, int]:
    """Set the special tokens of a model's configurations to those of a tokenizer of `transformers`, or a processor's.

    The generation configuration keeps its other end tokens, and so does a configuration with a list of them. A token
    that the tokenizer does not have stays as it is. Returns what changed; `logs` names it in one line.

    Source: `align_special_tokens` of transformers 5.23.
    """
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    of_model = getattr(model, "config", None)
    if of_model is None or not (_is_theirs(tokenizer) and hasattr(of_model, "get_text_config")):
        return {}
    config, generation = of_model.get_text_config(), getattr(model, "generation_config", None)
    changed = {}
    for name in _NAMES:
        token = getattr(tokenizer, name, None)
        known = [getattr(one, name, None) for one in (config, generation) if one is not None]
        if token is None or all(token in ids if isinstance(ids, list) else token == ids for ids in known):
            continue
        changed[name] = token
        is_end = name == "eos_token_id"
        setattr(config, name, _with(token, known[0]) if is_end and isinstance(known[0], list) else token)
        if generation is not None:
            setattr(generation, name, _with(token, known[1]) if is_end else token)
    if changed and logs:
        shown = ", ".join(f"{name}={token}" for name, token in changed.items())
        logger.warning("the model's special tokens are now those of the tokenizer: %s", shown)
    return changed


def _is_theirs(tokenizer: object) -> bool:
    """Whether it is a tokenizer of `transformers`, which is not imported for that."""
    return any(
        base.__name__ == "PreTrainedTokenizerBase" and base.__module__.startswith("transformers.")
        for base in type(tokenizer).__mro__
    )


def _with(token: int, ids: object) -> list[int]:
    known = ids if isinstance(ids, list) else [ids]
    return [token, *(one for one in known if isinstance(one, int) and one != token)]
