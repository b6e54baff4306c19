"""Writes a model's weights in the form that its kind is read with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import save_model as save_safetensors
from torch import nn

from onstep.events.context import unwrap
from onstep.models import Transformer, hf_obstacle, save_hf


def save_model(model: nn.Module, directory: Path, processing_class: Any = None) -> None:
    """Write `model` to `directory`: by its own `save_pretrained`, as a Hugging Face directory, or as safetensors.

    A plain module, and a `Transformer` that `transformers` has no architecture for, is read with
    `safetensors.torch.load_model(module, directory / "model.safetensors")`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    module: Any = unwrap(model)
    if isinstance(module, Transformer) and hf_obstacle(module) is None:
        save_hf(module, directory)
    elif hasattr(module, "save_pretrained"):
        module.save_pretrained(directory)
    else:
        save_safetensors(module, str(directory / "model.safetensors"))
    if hasattr(processing_class, "save_pretrained"):
        processing_class.save_pretrained(directory)
