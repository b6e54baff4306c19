"""Values as Megatron Bridge writes them, in Python (functions, types of torch, enums) and in YAML (`_target_`)."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from onstep.errors import ConfigError

TARGET, CALL, ARGS = "_target_", "_call_", "_args_"
"""Keys of YAML that stand for an object: what it is, whether to call it, and with which values."""


def plain(value: Any) -> Any:
    """A value of Bridge's YAML without its wrapping: the name of a function or type, or the value of an enum.

    A dictionary that stands for any other object keeps its `_target_`.
    """
    if isinstance(value, Mapping) and TARGET in value:
        if value.get(CALL) is False:
            return str(value[TARGET])
        if ARGS in value and len(value) <= 3 and len(value[ARGS]) == 1:
            return plain(value[ARGS][0])
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return value


def section_values(section: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keys of a section of YAML; of one that Bridge wrote, those that mean something.

    Bridge writes every key, and null for a section that is at its defaults. Without experts, the
    default of `moe_grouped_gemm`, which is another there, means nothing.
    """
    if TARGET not in values:
        return values
    idle = {TARGET}
    if not section:
        idle |= {str(key) for key, value in values.items() if value is None}
    if section == "model" and values.get("num_moe_experts") is None:
        idle.add("moe_grouped_gemm")
    return {key: value for key, value in values.items() if key not in idle}


def comparable(value: Any) -> Any:
    """A value that can be compared with those of a rule: the name of a type of torch, the value of an enum."""
    value = plain(value)
    if isinstance(value, Enum):
        return value.value
    return str(value) if type(value).__module__.partition(".")[0] == "torch" else value


def function_name(value: Any) -> str | None:
    """The last part of the name of a function, or of the text that names one; None for anything else."""
    if isinstance(value, str):
        return value.rpartition(".")[2]
    name = getattr(value, "__name__", None) if callable(value) else None
    return name if isinstance(name, str) else None


def target_name(value: Any) -> str | None:
    """The class that a dictionary of YAML stands for, without its module."""
    return str(value[TARGET]).rpartition(".")[2] if isinstance(value, Mapping) and TARGET in value else None


_NOT_OURS = {
    "dataset": (("FinetuningDatasetConfig", "HFDatasetConfig"), "set dataset.kind=chat with dataset.paths"),
    "model": (("Mamba", "T5", "VL", "DeepSeek"), "choose a model of the Llama, Qwen2, Qwen3 or GPT-2 family"),
    "peft": (("DoRA", "CanonicalLoRA", "VLMLoRA"), "set peft.peft_scheme=lora"),
}
"""Parts of names of classes that a section of Bridge's YAML may be and Onstep's is not, and the remedy."""


def check_target(section: str, values: Mapping[str, Any]) -> None:
    """Refuse a section of Bridge's YAML that is of a class whose counterpart does not exist here.

    Raises:
        ConfigError: naming the class and the remedy.
    """
    name, (classes, remedy) = target_name(values), _NOT_OURS.get(section, ((), ""))
    if name is not None and any(one in name for one in classes):
        raise ConfigError(f"{section} is a {name} of Megatron Bridge, which is not supported; {remedy}.")
