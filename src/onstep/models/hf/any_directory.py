"""Opens any Hugging Face directory: with Onstep's own model, or with the class of `transformers` for other families."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from onstep.config import ModelConfig
from onstep.models.hf.architecture import UnsupportedModelError
from onstep.models.hf.causal_lm import CausalLM
from onstep.models.hf.directory import load_hf, load_hf_config
from onstep.models.hf.family_directory import build_causal_lm, family_config, load_causal_lm, save_causal_lm
from onstep.models.hf.writing import save_hf
from onstep.models.transformer import Transformer, build_transformer, empty_transformer

LanguageModel = Transformer | CausalLM
"""What a run trains."""


def config_of_directory(directory: str | Path, *, trust_remote_code: bool = False) -> ModelConfig:
    """The configuration of the model in `directory`, from its `config.json` alone.

    It has `hf_config` if Onstep's `Transformer` does not compute the model.

    Raises:
        ConfigError: for a model that neither Onstep nor `transformers` has.
        OnstepError: if `config.json` is missing or unreadable.
    """
    try:
        return load_hf_config(directory)
    except UnsupportedModelError:
        return family_config(directory, trust_remote_code=trust_remote_code)


def load_directory(
    directory: str | Path, config: ModelConfig | None = None, dtype: torch.dtype = torch.float32
) -> LanguageModel:
    """The model in `directory` with its weights, in `dtype` on the CPU. Raises like `load_hf`."""
    config = config_of_directory(directory) if config is None else config
    return load_hf(directory, config, dtype) if config.hf_config is None else load_causal_lm(directory, config, dtype)


def build_model(config: ModelConfig, seed: int | None = None, dtype: torch.dtype = torch.float32) -> LanguageModel:
    """A new model of `config` on the CPU; see `build_transformer`."""
    if config.hf_config is None:
        return build_transformer(config, seed, dtype)
    return build_causal_lm(config, seed, dtype=dtype)


def empty_model(config: ModelConfig, dtype: torch.dtype = torch.float32, device: str = "cpu") -> LanguageModel:
    """A model on the CPU, or on `meta`, for a caller that fills all its weights; see `empty_transformer`."""
    if config.hf_config is None:
        return empty_transformer(config, dtype, device)
    with torch.device(device):
        return build_causal_lm(config, is_empty=True, dtype=dtype)


def fill_deferred(model: LanguageModel, state: Mapping[str, Tensor]) -> None:
    """Give a model deferred weights in place of its own (`onstep.models.deferred`)."""
    model.load_state_dict(state, assign=True)
    if isinstance(model, CausalLM):
        model.model.tie_weights()


def save_directory(
    model: LanguageModel, directory: str | Path, *, eos_id: int | None = None, writes: bool = True
) -> None:
    """Write `model` to `directory`, for `AutoModelForCausalLM.from_pretrained`; see `save_hf` and `save_causal_lm`."""
    if isinstance(model, Transformer):
        save_hf(model, directory, eos_id=eos_id, writes=writes)
    else:
        save_causal_lm(model, directory, writes=writes)
