"""Adds LoRA weights to a frozen model with the `peft` library, and exports them as files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from onstep.config import PeftConfig
from onstep.config.checks.model import LORA_PROJECTIONS
from onstep.config.suggestions import nearest
from onstep.distributed.shards import is_sharded, whole
from onstep.errors import ConfigError, MissingExtraError
from onstep.files.durability import replace_durably
from onstep.metrics.model_shape import is_target
from onstep.models import hf_config_dict
from onstep.models.deferred import gathered
from onstep.models.hf.any_directory import LanguageModel, empty_model, fill_deferred
from onstep.models.hf.causal_lm import CausalLM
from onstep.models.quantized_layers import dequantized, is_quantized, num_weights
from onstep.training.setup.weight_types import common_type

_FUSED = ("gpt2",)
"""Models of `transformers` that fuse several of Onstep's matrices into one, so that an adapter has no names there."""

_ROUTERS = ("gate", "router", "shared_expert_gate")
"""Names of linear layers of `transformers` that choose experts."""

ADAPTER = "default"
"""The name under which `peft` registers the added weights."""

_BASE, _A, _B = ".base_layer.", f".lora_A.{ADAPTER}.", f".lora_B.{ADAPTER}."


def add_lora(model: LanguageModel, config: PeftConfig, seed: int) -> None:
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
        model: a `Transformer` or a `CausalLM`.
        target_modules: name suffixes, Onstep's (`query`) or those of `transformers` (`q_proj`); None means all.

    Raises:
        ConfigError: for a suffix that no projection has.
    """
    known = projections(model)
    if not known:
        raise ConfigError(
            "peft.peft_scheme=lora adapts linear layers, and this model has none below its output; set it to null to "
            "train all weights."
        )
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


def projections(model: nn.Module) -> dict[str, str]:
    """The linear layers that LoRA can adapt, each with its name in `transformers`.

    Of a `CausalLM` these are all that are trained but the output and the routers of experts.
    """
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    if not isinstance(model, CausalLM):
        found = {name: projection_in_hf(name) for name in linear}
        return {name: theirs for name, theirs in found.items() if theirs is not None}
    output = model.model.get_output_embeddings()
    return {
        name: name.removeprefix("model.")
        for name, module in linear.items()
        if module is not output
        and (module.weight.requires_grad or is_quantized(module))
        and name.rpartition(".")[2] not in _ROUTERS
    }


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
    total = sum(num_weights(parameter) for parameter in model.parameters())
    trainable = sum(num_weights(parameter) for parameter in model.parameters() if parameter.requires_grad)
    return (
        f"PEFT statistics:\n"
        f"  Total parameters: {total:,}\n"
        f"  Trainable parameters: {trainable:,}\n"
        f"  Trainable percentage: {100 * trainable / max(total, 1):.2f}%"
    )


def merged_state_dict(state: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """The weights of the equivalent model without LoRA: `W + scale * B A`, under the plain names.

    A quantized `W` is added to in float32, as in `peft`; the sum has the type of the weights that are not quantized.

    Args:
        state: the state of a model changed by `add_lora`.
        scale: `alpha / dim`.
    """
    merged, whole = {}, dequantized(state)
    for name, tensor in whole.items():
        if _A in name or _B in name:
            continue
        if _BASE in name and name.endswith(".weight"):
            low, high = whole[name.replace(_BASE, _A)], whole[name.replace(_BASE, _B)]
            tensor = tensor + scale * (high.float() @ low.float()).to(tensor.dtype)
        merged[name.replace(_BASE, ".")] = tensor
    changed = {name.replace(_BASE, ".") for name, tensor in whole.items() if tensor is not state[name]}
    stored = common_type({name: tensor for name, tensor in merged.items() if name not in changed})
    return {name: tensor.to(stored) if name in changed else tensor for name, tensor in merged.items()}


def plain_name(name: str) -> str:
    """The name that a weight of the base has without LoRA."""
    return name.replace(_BASE, ".")


def adapted_names(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """For each weight that `merged_state_dict` changes or drops, the names of all weights that it computes with it.

    Args:
        names: those of a state of a model changed by `add_lora`, whose base is not quantized.
    """
    found: dict[str, tuple[str, ...]] = {}
    all_names = set(names)
    for low in (name for name in all_names if _A in name):
        module = low.partition(_A)[0]
        group = tuple(name for name in (f"{module}{_BASE}weight", low, low.replace(_A, _B)) if name in all_names)
        found |= dict.fromkeys(group, group)
    return found


def merged_model(model: LanguageModel, config: PeftConfig) -> LanguageModel:
    """A copy on the CPU with LoRA's matrices merged into the weights; `model` is not changed.

    The weights of a model that is sharded over ranks are deferred: all ranks write the copy, which gathers them.
    """
    state = {name: gathered(tensor.detach()).cpu() for name, tensor in model.state_dict().items()}
    state = merged_state_dict(state, config.alpha / config.dim)
    if is_sharded(model.state_dict().values()):
        merged = empty_model(model.config, common_type(state), "meta")
        fill_deferred(merged, state)
    else:
        merged = empty_model(model.config, common_type(state))
        merged.load_state_dict(state)
    return merged


def has_hf_names(model: LanguageModel) -> bool:
    """Whether `transformers` has a separate matrix for each projection."""
    return isinstance(model, CausalLM) or hf_config_dict(model.config)["model_type"] not in _FUSED


def save_adapter(
    model: LanguageModel,
    config: PeftConfig,
    directory: str | Path,
    base_model: str | None,
    *,
    writes: bool = True,
) -> None:
    """Write the LoRA weights to `directory`, for `PeftModel.from_pretrained(base, directory)`.

    Each file is replaced atomically. One process calls this, or, if the weights are sharded, all ranks.

    Args:
        model: a model changed by `add_lora`.
        config: the configuration that it was changed with.
        base_model: the Hugging Face directory that the adapter applies to, as recorded in the file; None if unknown.
        writes: whether this rank writes; the others join in gathering the weights.
    """
    tensors = _tensors(model)
    if not writes:
        return
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    described = _described(list(tensors), _everywhere(model), config, base_model)
    partial = target / "adapter.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.replace(target / "adapter_model.safetensors")
    replace_durably(target / "adapter_config.json", json.dumps(described, indent=2) + "\n")


def _tensors(model: LanguageModel) -> dict[str, Tensor]:
    """The added weights under `peft`'s names: the module's name in `transformers`, and which of the two matrices."""
    found = {}
    for name, tensor in model.state_dict().items():
        module, matrix, _ = name.partition(".lora_")
        theirs = _theirs(model)(module)
        if matrix and theirs is not None:
            kind = name.removeprefix(module + matrix).partition(f".{ADAPTER}.")[0]
            found[f"base_model.model.{theirs}.lora_{kind}.weight"] = whole(tensor.detach()).cpu().contiguous()
    return found


def _everywhere(model: LanguageModel) -> dict[str, int]:
    """How many linear layers have a name that ends so, in `transformers`, by the last part of the name."""
    names = [name.removesuffix(".base_layer") for name, one in model.named_modules() if isinstance(one, nn.Linear)]
    plain = {name for name in names if ".lora_" not in name}
    return Counter(name.rpartition(".")[2] for name in map(_theirs(model), plain) if name is not None)


def _theirs(model: LanguageModel) -> Callable[[str], str | None]:
    return (lambda name: name.removeprefix("model.")) if isinstance(model, CausalLM) else projection_in_hf


def _described(
    names: list[str], everywhere: Mapping[str, int], config: PeftConfig, base_model: str | None
) -> dict[str, object]:
    """`adapter_config.json`, with the targets by the ends of their names where all layers with such names have them."""
    modules = sorted({name.removeprefix("base_model.model.").partition(".lora_")[0] for name in names})
    ends = Counter(module.rpartition(".")[2] for module in modules)
    is_everywhere = all(everywhere[end] == count for end, count in ends.items())
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
        "target_modules": sorted(ends) if is_everywhere else modules,
    }


def _alpha(config: PeftConfig) -> float | int:
    """An integer where possible, as `peft` writes it."""
    return int(config.alpha) if float(config.alpha).is_integer() else config.alpha
