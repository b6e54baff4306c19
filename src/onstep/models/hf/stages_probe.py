"""Finds out whether the stages of a family of transformers compute what the whole model does, on a small copy."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from onstep.config import ModelConfig
from onstep.distributed.pipeline.seats import Seat
from onstep.errors import ConfigError
from onstep.models.hf.documents_probe import small_copy
from onstep.models.hf.family_directory import one_line
from onstep.models.hf.stages import called, cut, new_cache, num_layers_of

_FAILURES = (TypeError, ValueError, RuntimeError, IndexError, AttributeError, KeyError, NotImplementedError)


def check_stages(config: ModelConfig) -> None:
    """Refuse a family whose stages do not compute what the whole model does: a small copy of it is tried, on the CPU.

    Args:
        config: the configuration, with `hf_config`; a family of which no small copy can be built is not tried.

    Raises:
        ConfigError: saying what differs.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        try:
            whole = small_copy(config)
        except ConfigError:
            return
        tokens = torch.randint(1, 60, (2, 9))
        halves = _halves_of(whole)
        expected = whole.eval()(tokens)
        try:
            found = _through(cut(whole, halves), tokens)
        except _FAILURES as error:
            reason = one_line(error)
        else:
            if torch.equal(found, expected):
                return
            reason = f"logits differ by {float((found - expected).abs().max()):.0e} from those of the whole model"
    raise ConfigError(
        f"models of the type {(config.hf_config or {}).get('model_type')} cannot be cut into the stages of a pipeline: "
        f"a layer must get and return hidden states, and nothing behind the layers may read the embeddings ({reason}); "
        f"set parallel.pipeline_model_parallel_size=1, and let parallel.data_parallel_shard_size=-1 divide the model."
    )


def keeps_states(config: ModelConfig) -> bool:
    """Whether the stages of a family can keep keys and values of earlier tokens: a small copy is tried, on the CPU.

    Args:
        config: the configuration, with `hf_config`.
    """
    return _keeps_states(json.dumps(config.hf_config, sort_keys=True, default=str), config.vocab_size)


@lru_cache(maxsize=8)
def _keeps_states(hf_config: str, vocab_size: int | None) -> bool:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        try:
            whole = small_copy(ModelConfig(hf_config=json.loads(hf_config), vocab_size=vocab_size))
            tokens = torch.randint(1, 60, (2, 16))
            stages = cut(whole.eval(), _halves_of(whole))
            caches = [new_cache(stage) for stage in stages]
            found = [_through(stages, part, caches) for part in torch.split(tokens, [9, 1, 6], dim=1)]
        except (ConfigError, *_FAILURES):
            return False
        return torch.allclose(torch.cat(found, 1), whole(tokens), rtol=1e-4, atol=1e-5)


def _halves_of(whole: nn.Module) -> list[Seat]:
    number = num_layers_of(whole)
    halves = (range(number // 2), range(number // 2, number))
    return [Seat(stage, halves) for stage in range(2)]


def _through(stages: list[nn.Module], tokens: Tensor, caches: Sequence[Any] = (None, None)) -> Tensor:
    """What the last stage returns."""
    hidden = None
    for stage, cache in zip(stages, caches, strict=True):
        hidden = called(stage, hidden, tokens, cache)
    assert hidden is not None
    return hidden
