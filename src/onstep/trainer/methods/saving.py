"""Hugging Face's methods that write the model, the state and the model card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import save_model as save_safetensors
from torch import nn

from onstep.errors import ConfigError
from onstep.events.context import unwrap
from onstep.models import Transformer, hf_obstacle, save_hf
from onstep.trainer.base_trainer import BaseTrainer


class SavingMethods(BaseTrainer):
    """Hugging Face's methods that write the model, the state and the model card."""

    def save_model(self, output_dir: str | None = None) -> None:
        """Write the weights, and the processing class, to `output_dir` (default: `args.output_dir`), on rank 0.

        Raises:
            ConfigError: if `model_init` has not created a model yet.
        """
        if self.model is None:
            raise ConfigError(
                "Trainer has no model to save yet: model_init runs when training starts; call train() first."
            )
        if self.global_state is None or self.global_state.world.is_main:
            save_model(self.model, Path(output_dir or str(self.args.output_dir)), self.processing_class)


def save_model(model: nn.Module, directory: Path, processing_class: Any = None) -> None:
    """Write `model` to `directory`: with its own `save_pretrained`, as a Hugging Face directory, or as safetensors.

    A plain module, and a `Transformer` without an architecture in `transformers`, can be loaded with
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
