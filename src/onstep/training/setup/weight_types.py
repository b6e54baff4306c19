"""Gives each weight of a model the type that the configuration asks for: the trained ones, and the frozen ones.

Trained weights have the type `optimizer.params_dtype`. Frozen ones are bfloat16 wherever a step computes in bfloat16,
under `mixed_precision=bf16_mixed` or with bfloat16 weights, else float32: autocast uses a bfloat16 weight as it is,
while it would copy a float32 one. Models are built, and their files are read, in the type of most of their weights
(`type_at_first`), so that no float32 copy of a frozen model ever exists; `set_weight_types` then converts the rest,
once it is known what is trained.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from onstep.config import ConfigContainer

_NAMES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_CONVERTED = (torch.float32, torch.bfloat16, torch.float16)


def trained_type(config: ConfigContainer) -> torch.dtype:
    """The type of trained weights."""
    return _NAMES[config.optimizer.params_dtype]


def frozen_type(config: ConfigContainer) -> torch.dtype:
    """The type of frozen weights."""
    computes_in_bfloat16 = config.mixed_precision == "bf16_mixed" or config.optimizer.params_dtype == "bfloat16"
    return torch.bfloat16 if computes_in_bfloat16 else torch.float32


def type_at_first(config: ConfigContainer) -> torch.dtype:
    """The type in which a model is built and read: that of frozen weights if LoRA freezes them all."""
    return trained_type(config) if config.peft.peft_scheme is None else frozen_type(config)


def set_weight_types(modules: Iterable[nn.Module], config: ConfigContainer) -> None:
    """Convert trained and frozen weights to their types, in place; the parameters stay the same objects.

    Quantized weights, other subclasses of tensors and buffers stay as they are, and so do the frozen weights of a
    LayerNorm behind an embedding that is trained in float32, which a CPU requires to have the type of its input.
    """
    trained, frozen = trained_type(config), frozen_type(config)
    for module in modules:
        kept = set() if trained is frozen else _weights_behind_float32(module)
        for param in module.parameters():
            wanted = trained if param.requires_grad or id(param) in kept else frozen
            if type(param) in (nn.Parameter, Tensor) and param.dtype in _CONVERTED and param.dtype != wanted:
                param.data = param.data.to(wanted)


def _weights_behind_float32(module: nn.Module) -> set[int]:
    """The weights, by identity, of the norms that may get a float32 input."""
    parts = list(module.modules())
    has_trained = any(isinstance(one, nn.Embedding) and one.weight.requires_grad for one in parts)
    norms = [one for one in parts if has_trained and isinstance(one, nn.LayerNorm)]
    return {id(param) for norm in norms for param in norm.parameters()}


def common_type(state: Mapping[str, Tensor]) -> torch.dtype:
    """The type that holds all weights of a model's state exactly; float32 if there are none. Buffers do not count."""
    types = {one.dtype for name, one in state.items() if one.is_floating_point() and not name.endswith("expert_bias")}
    found = types.pop() if types else torch.float32
    for one in types:
        found = torch.promote_types(found, one)
    return found
