"""The rules of fine-tuning: where the weights come from, and what LoRA goes to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from onstep.config.part import nearest
from onstep.config.parts import ConfigContainer, ModelConfig
from onstep.errors import ConfigError

LORA_PROJECTIONS: Mapping[str, str] = {
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}
"""The matrices of a layer that LoRA goes to, by their names here and in `transformers`."""


def check_finetune(config: ConfigContainer) -> None:
    """Refuse fine-tuning of nothing, of two things at once, and LoRA on weights that stay random.

    Raises:
        ConfigError: naming the value, the rule and the remedy.
    """
    checkpoint, peft = config.checkpoint, config.peft
    sources = [name for name in ("pretrained_checkpoint", "load") if getattr(checkpoint, name) is not None]
    if checkpoint.finetune and not sources:
        raise ConfigError(
            "checkpoint.finetune=True takes weights to start from; set checkpoint.pretrained_checkpoint to a Hugging "
            "Face folder, a run or a checkpoint."
        )
    if checkpoint.finetune and len(sources) == 2 and not loads_own(config):
        raise ConfigError(
            f"checkpoint.pretrained_checkpoint={checkpoint.pretrained_checkpoint} and checkpoint.load="
            f"{checkpoint.load} both name the weights to fine-tune; keep one and set the other to null."
        )
    if peft.peft_scheme is None:
        return
    if not sources:
        raise ConfigError(
            f"peft.peft_scheme={peft.peft_scheme} trains a few weights beside trained ones, and there are none; set "
            f"checkpoint.pretrained_checkpoint, or peft.peft_scheme=null to train all weights."
        )
    if peft.target_modules == []:
        raise ConfigError(
            "peft.target_modules=[] adds weights to no layer; name ends such as [query, value], or null for every "
            "projection."
        )


def check_lora_targets(config: ConfigContainer) -> None:
    """Refuse an end in `peft.target_modules` that no projection of the configured model has.

    Raises:
        ConfigError: naming it, the nearest one and all there are.
    """
    if config.peft.peft_scheme is None or config.peft.target_modules is None:
        return
    layers = [_projections(config.model, index) for index in range(config.model.num_layers)]
    names = [
        name
        for index, projections in enumerate(layers)
        for ours in projections
        for name in (f"layers.{index}.{ours}", f"model.layers.{index}.{LORA_PROJECTIONS[ours]}")
    ]
    for target in config.peft.target_modules:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            ends = list(dict.fromkeys(ours.rpartition(".")[2] for projections in layers for ours in projections))
            raise ConfigError(
                f"peft.target_modules has {target!r}, which no projection of the layers ends with."
                f"{nearest(target, ends)} Ends: {', '.join(ends)}, or transformers' names of these."
            )


def _projections(model: ModelConfig, layer: int) -> list[str]:
    """The projections of a layer; the stacked matrices of experts are none."""
    frequency = model.moe_layer_freq
    has_experts = frequency[layer] if isinstance(frequency, list) else layer % frequency == 0
    is_moe = model.num_moe_experts is not None and has_experts
    return [
        name
        for name in LORA_PROJECTIONS
        if name.startswith("attention.") or (not is_moe and (model.gated_linear_unit or name != "feed_forward.gate"))
    ]


def loads_own(config: ConfigContainer) -> bool:
    """Whether `checkpoint.load` is the folder that the run saves to: it then continues the run."""
    checkpoint, run = config.checkpoint, config.run
    if checkpoint.load is None:
        return False
    own = checkpoint.save
    if own is None and run.name is not None:
        own = str(Path(run.output_dir) / run.name / "checkpoints")
    return own is not None and Path(own).resolve() == Path(checkpoint.load).resolve()
