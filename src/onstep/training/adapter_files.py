"""LoRA's weights as a folder that `peft` opens on a model of `transformers`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from onstep.config.parts import PeftConfig
from onstep.models import Transformer, hf_config_dict
from onstep.training.lora import ADAPTER, projection_in_hf

ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
_FUSED = ("gpt2",)
"""Models of `transformers` that keep several of our matrices in one, so that an adapter has no names there."""


def has_hf_names(model: Transformer) -> bool:
    """Whether `transformers` has a matrix of its own for each projection."""
    return hf_config_dict(model.config)["model_type"] not in _FUSED


def save_adapter(model: Transformer, config: PeftConfig, directory: str | Path, base_model: str | None) -> None:
    """Write what LoRA added to `directory`, so that `PeftModel.from_pretrained(base, directory)` opens it.

    Each file is replaced whole. One process calls this.

    Args:
        model: one that `add_lora` changed.
        config: what it was changed by.
        base_model: the Hugging Face folder that it goes on, as the file tells it; None where that is not known.
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = _tensors(model)
    partial = folder / f"{ADAPTER_WEIGHTS}.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    os.replace(partial, folder / ADAPTER_WEIGHTS)
    described = _described(list(tensors), model.config.num_layers, config, base_model)
    partial = folder / f"{ADAPTER_CONFIG}.partial"
    partial.write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, folder / ADAPTER_CONFIG)


def _tensors(model: Transformer) -> dict[str, Tensor]:
    """The added weights by `peft`'s names: the module's in `transformers`, and which of the two matrices."""
    found = {}
    for name, tensor in model.state_dict().items():
        module, matrix, _ = name.partition(".lora_")
        theirs = projection_in_hf(module)
        if matrix and theirs is not None:
            kind = name.removeprefix(module + matrix).partition(f".{ADAPTER}.")[0]
            found[f"base_model.model.{theirs}.lora_{kind}.weight"] = tensor.detach().cpu().contiguous()
    return found


def _described(names: list[str], num_layers: int, config: PeftConfig, base_model: str | None) -> dict[str, Any]:
    """`adapter_config.json`; the targets by the ends of their names where every layer has all of them."""
    modules = sorted({name.removeprefix("base_model.model.").partition(".lora_")[0] for name in names})
    ends = sorted({module.split(".", 3)[3] for module in modules})
    is_everywhere = len(modules) == len(ends) * num_layers
    alpha = int(config.alpha) if float(config.alpha).is_integer() else config.alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "r": config.dim,
        "lora_alpha": alpha,
        "lora_dropout": config.dropout,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "target_modules": [end.rpartition(".")[2] for end in ends] if is_everywhere else modules,
    }
