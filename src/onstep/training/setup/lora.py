"""Adds LoRA weights to a frozen model with the `peft` library, and exports them as files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from onstep.config import PeftConfig
from onstep.config.checks.model import LORA_PROJECTIONS
from onstep.config.suggestions import nearest
from onstep.errors import ConfigError, MissingExtraError
from onstep.files.durability import replace_durably
from onstep.metrics.model_shape import is_target
from onstep.models import Transformer, hf_config_dict
from onstep.models.transformer import empty_transformer

_FUSED = ("gpt2",)
"""Models of `transformers` that fuse several of Onstep's matrices into one, so that an adapter has no names there."""

ADAPTER = "default"
"""The name under which `peft` registers the added weights."""

_BASE, _A, _B = ".base_layer.", f".lora_A.{ADAPTER}.", f".lora_B.{ADAPTER}."


def add_lora(model: Transformer, config: PeftConfig, seed: int) -> None:
    """Freeze `model` and add matrices `B A` of rank `config.dim` to its projections, in place.

    `A` is drawn from `seed` alone, the same on every rank, and `B` is 0: the model's output does not change. torch's
    global generator is not touched.

    Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021), section 4.1.

    Raises:
        ConfigError: if a target is not a projection of the model.
        MissingExtraError: if `peft` is not installed.
    """
    try:
        import peft
    except ImportError as error:
        raise MissingExtraError("LoRA requires the peft library: pip install 'onstep[peft]'") from error
    lora = peft.LoraConfig(
        r=config.dim,
        lora_alpha=_alpha(config),  # type: ignore[arg-type]  # peft accepts any number
        lora_dropout=config.dropout,
        target_modules=target_names(model, config.target_modules),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(lora, model, adapter_name=ADAPTER)


def target_names(model: nn.Module, target_modules: Sequence[str] | None) -> list[str]:
    """The full names of the layers' projections that LoRA applies to, in order.

    Args:
        model: a `Transformer`.
        target_modules: name suffixes, Onstep's (`query`) or those of `transformers` (`q_proj`); None means all.

    Raises:
        ConfigError: for a suffix that no projection has.
    """
    found = {name: projection_in_hf(name) for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    known = {name: theirs for name, theirs in found.items() if theirs is not None}
    if target_modules is None:
        return list(known)
    for target in target_modules:
        if not any(is_target(name, [target]) for pair in known.items() for name in pair):
            ends = sorted({name.rpartition(".")[2] for name in known})
            raise ConfigError(
                f"peft.target_modules has {target!r}, which no projection of the layers ends with."
                f"{nearest(target, ends)} Ends: {', '.join(ends)}."
            )
    return [
        name for name, theirs in known.items() if is_target(name, target_modules) or is_target(theirs, target_modules)
    ]


def projection_in_hf(name: str) -> str | None:
    """`transformers`' name for a layer's projection; None for any other module."""
    layers, _, rest = name.partition(".")
    index, _, projection = rest.partition(".")
    if layers != "layers" or projection not in LORA_PROJECTIONS:
        return None
    return f"model.layers.{index}.{LORA_PROJECTIONS[projection]}"


def has_lora(model: nn.Module) -> bool:
    """Whether `add_lora` was applied."""
    return any(_A in f".{name}" for name, _ in model.named_parameters())


def statistics(model: nn.Module) -> str:
    """The number of trained weights, in Megatron Bridge's format."""
    total = sum(parameter.numel() for parameter in model.parameters())
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return (
        f"PEFT statistics:\n"
        f"  Total parameters: {total:,}\n"
        f"  Trainable parameters: {trainable:,}\n"
        f"  Trainable percentage: {100 * trainable / max(total, 1):.2f}%"
    )


def merged_state_dict(state: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """The weights of the equivalent model without LoRA: `W + scale * B A`, under the plain names.

    Args:
        state: the state of a model changed by `add_lora`.
        scale: `alpha / dim`.
    """
    merged = {}
    for name, tensor in state.items():
        if _A in name or _B in name:
            continue
        if _BASE in name and name.endswith(".weight"):
            low, high = state[name.replace(_BASE, _A)], state[name.replace(_BASE, _B)]
            tensor = tensor + scale * (high.float() @ low.float()).to(tensor.dtype)
        merged[name.replace(_BASE, ".")] = tensor
    return merged


def merged_model(model: Transformer, config: PeftConfig) -> Transformer:
    """A copy on the CPU with LoRA's matrices merged into the weights; `model` is not changed."""
    state = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    merged = empty_transformer(model.config)
    merged.load_state_dict(merged_state_dict(state, config.alpha / config.dim))
    return merged


def has_hf_names(model: Transformer) -> bool:
    """Whether `transformers` has a separate matrix for each projection."""
    return hf_config_dict(model.config)["model_type"] not in _FUSED


def save_adapter(model: Transformer, config: PeftConfig, directory: str | Path, base_model: str | None) -> None:
    """Write the LoRA weights to `directory`, for `PeftModel.from_pretrained(base, directory)`.

    Each file is replaced atomically. One process calls this.

    Args:
        model: a model changed by `add_lora`.
        config: the configuration that it was changed with.
        base_model: the Hugging Face directory that the adapter applies to, as recorded in the file; None if unknown.
    """
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    tensors = _tensors(model)
    described = _described(list(tensors), model.config.num_layers, config, base_model)
    partial = target / "adapter.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.replace(target / "adapter_model.safetensors")
    replace_durably(target / "adapter_config.json", json.dumps(described, indent=2) + "\n")


def _tensors(model: Transformer) -> dict[str, Tensor]:
    """The added weights under `peft`'s names: the module's name in `transformers`, and which of the two matrices."""
    found = {}
    for name, tensor in model.state_dict().items():
        module, matrix, _ = name.partition(".lora_")
        theirs = projection_in_hf(module)
        if matrix and theirs is not None:
            kind = name.removeprefix(module + matrix).partition(f".{ADAPTER}.")[0]
            found[f"base_model.model.{theirs}.lora_{kind}.weight"] = tensor.detach().cpu().contiguous()
    return found


def _described(names: list[str], num_layers: int, config: PeftConfig, base_model: str | None) -> dict[str, object]:
    """`adapter_config.json`, with the targets by the ends of their names if every layer has all of them."""
    modules = sorted({name.removeprefix("base_model.model.").partition(".lora_")[0] for name in names})
    ends = sorted({module.split(".", 3)[3] for module in modules})
    is_everywhere = len(modules) == len(ends) * num_layers
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "r": config.dim,
        "lora_alpha": _alpha(config),
        "lora_dropout": config.dropout,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "target_modules": [end.rpartition(".")[2] for end in ends] if is_everywhere else modules,
    }


def _alpha(config: PeftConfig) -> float | int:
    """An integer where possible, as `peft` writes it."""
    return int(config.alpha) if float(config.alpha).is_integer() else config.alpha
