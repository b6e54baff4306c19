"""Fine-tuning of a few added weights."""

from __future__ import annotations

from dataclasses import dataclass

from onstep.config.section import INCOMPATIBLE, TRAJECTORY, ConfigSection, option


@dataclass
class PeftConfig(ConfigSection):
    """Fine-tuning of a few added weights, by the `peft` library."""

    NEEDS = "peft.peft_scheme=lora"

    peft_scheme: str | None = option(
        None,
        INCOMPATIBLE,
        choices=("lora",),
        common=True,
        help="Parameter-efficient fine-tuning: lora; None trains all weights.",
    )
    dim: int = option(16, INCOMPATIBLE, bound="> 0", help="Rank of the LoRA matrices.")
    alpha: float = option(
        32.0, TRAJECTORY, bound="> 0", help="Scale of LoRA: its output is multiplied by `alpha / dim`."
    )
    dropout: float = option(
        0.0, TRAJECTORY, bound="at least 0 and below 1", help="Dropout probability before the LoRA matrices."
    )
    target_modules: list[str] | None = option(
        None,
        INCOMPATIBLE,
        help="Suffixes of the names of the layers to adapt; None is every projection of attention and feed-forward "
        "blocks.",
    )
    base_quantization: str | None = option(
        None,
        INCOMPATIBLE,
        choices=("nf4", "int8"),
        common=True,
        help="Type of the frozen linear layers of the base (QLoRA), by `bitsandbytes`: nf4 (4 bits, with quantized "
        "scales) | int8; None holds them in the precision of the run.",
    )
