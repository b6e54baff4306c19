"""Gives `TrainingArguments` Hugging Face's methods that turn them into plain values, and texts into dictionaries."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields
from enum import Enum
from typing import Any

from onstep.config.hf.accelerator import AcceleratorConfig
from onstep.config.hf.sharding import plain_parallelism
from onstep.config.hf.unparsed import UNPARSED


class SerializingMethods:
    """Hugging Face's methods that turn arguments, also those of a subclass, into plain values."""

    _VALID_DICT_FIELDS = [  # noqa: RUF012 - Hugging Face's name and type, which subclasses extend
        *("accelerator_config", "fsdp_config", "deepspeed", "activation_checkpointing_kwargs"),
        *("gradient_checkpointing_kwargs", "lr_scheduler_kwargs"),
    ]
    """Fields that also accept a dictionary as JSON; a subclass adds its own."""

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values; tokens are hidden, and a `dtype` in a dictionary is its name."""
        values: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(self) if each.init}  # type: ignore[arg-type]
        if "parallelism_config" in values:
            values["parallelism_config"] = plain_parallelism(values["parallelism_config"])
        values |= {name: value for name in UNPARSED if (value := getattr(self, name))}
        for name, value in values.items():
            values[name] = f"<{name.upper()}>" if name.endswith("_token") else _plain(value)
        self._dict_dtype_to_str(values)
        return values

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore pickled arguments; those of transformers, as in `training_args.bin`, get Onstep's values."""
        vars(self).update(state)
        if "_n_gpu" in state:  # of transformers
            for each in fields(self):  # type: ignore[arg-type]
                if each.default_factory is not MISSING and each.name not in state:
                    setattr(self, each.name, each.default_factory())
            self._settle()  # type: ignore[attr-defined]

    def to_json_string(self) -> str:
        """`to_dict()` as JSON."""
        return json.dumps(self.to_dict(), indent=2, default=_dtype_name)

    def to_sanitized_dict(self) -> dict[str, Any]:
        """`to_dict()` with the batch sizes, and text in place of what is not a number, switch or text: for trackers."""
        sizes = {name: getattr(self, name) for name in ("train_batch_size", "eval_batch_size")}
        return {
            name: one if type(one) in (bool, int, float, str) else str(one)
            for name, one in {**self.to_dict(), **sizes}.items()
        }

    def _dict_dtype_to_str(self, d: dict[str, Any]) -> None:
        """Replace torch dtypes under the key `dtype`, in this dictionary and those in it, by their names."""
        if d.get("dtype") is not None and not isinstance(d["dtype"], str):
            d["dtype"] = str(d["dtype"]).split(".")[1]
        for value in d.values():
            if isinstance(value, dict):
                self._dict_dtype_to_str(value)


def _plain(value: Any) -> Any:
    """A value as Hugging Face's `to_dict` has it; dictionaries are copied, so that nothing of the arguments changes."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, list):
        return [one.value if isinstance(one, Enum) else one for one in value]
    if isinstance(value, AcceleratorConfig):
        return value.to_dict()
    if not isinstance(value, dict):
        return value
    plain = {key: _plain(one) if isinstance(one, dict) else one for key, one in value.items()}
    quantization: Any = plain.get("quantization_config")
    if hasattr(quantization, "to_dict"):
        plain["quantization_config"] = quantization.to_dict()
    return plain


def _dtype_name(value: object) -> str:
    """The name of a torch dtype, for JSON; torch is not imported for that.

    Raises:
        TypeError: for anything else.
    """
    if type(value).__name__ == "dtype" and type(value).__module__ == "torch":
        return str(value).removeprefix("torch.")
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def typed_texts(values: Mapping[str, Any]) -> dict[str, Any]:
    """A dictionary that came as text, with switches and numbers in place of the texts that mean them, at any depth."""
    return {key: typed_texts(one) if isinstance(one, dict) else _typed(one) for key, one in values.items()}


def _typed(value: Any) -> Any:
    """The switch or number that a text means, as Hugging Face reads it; anything else as it is."""
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    if value.isdigit():
        return int(value)
    return float(value) if value.replace(".", "", 1).isdigit() else value
