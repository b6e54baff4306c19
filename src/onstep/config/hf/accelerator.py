"""The rules of `accelerator_config`: every key has its effect, or is refused by name."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from onstep.config.hf.accelerate_state import use_configured_state
from onstep.config.suggestions import nearest
from onstep.errors import ConfigError
from onstep.files.bounded_reading import parse_json, read_json

_NAME = "TrainingArguments.accelerator_config"
_ALLOWED: dict[str, tuple[tuple[Any, ...], str]] = {
    "split_batches": (
        (False,),
        "a micro-batch has per_device_train_batch_size samples on each rank; divide it instead",
    ),
    "dispatch_batches": ((None, False), "every rank reads its own micro-batches, which are the same; drop the key"),
    "even_batches": ((True, False), ""),
    "use_seedable_sampler": ((True, False), ""),
    "non_blocking": ((True, False), ""),
    "use_configured_state": ((None, True, False), ""),
}
"""The values of each key that are allowed, and what to do instead of another. Every sample is trained on once an epoch,
whatever their number, and copies from pinned memory never block, so `even_batches` and `non_blocking` change nothing.
"""
_ACCUMULATION = {
    "num_steps": "",
    "sync_each_batch": "gradients are reduced once a step, which gives the same sums; drop the key",
    "adjust_scheduler": "the schedule counts optimizer steps; drop the key",
    "sync_with_dataloader": "the last step of an epoch is a step of its own; drop the key",
}
_DEFAULTS = {"sync_each_batch": False, "adjust_scheduler": True, "sync_with_dataloader": True}


@dataclass
class AcceleratorConfig:
    """`accelerator_config` of `TrainingArguments`, with the attributes and methods of transformers' class.

    What an attribute is set to is checked when training starts.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = True
    non_blocking: bool = False
    gradient_accumulation_kwargs: dict[str, Any] | None = None
    use_configured_state: bool = False

    def to_dict(self) -> dict[str, Any]:
        """All values."""
        return copy.deepcopy(vars(self))

    def pop(self, key: str, default: object = None) -> object:
        """Remove an attribute and return it."""
        return vars(self).pop(key, default)

    @classmethod
    def from_json_file(cls, json_file: str) -> Self:
        """The values in a file.

        Raises:
            ConfigError: if it has none.
        """
        return cls(**_from_text(json_file))

    def changed(self) -> dict[str, Any]:
        """The values with an effect that differ from the defaults; what `gradient_accumulation_kwargs` sets is set."""
        return {} if self.use_seedable_sampler else {"use_seedable_sampler": False}


def settle_accelerator(args: Any) -> None:
    """Read `accelerator_config` and make it an `AcceleratorConfig`; `num_steps` sets `gradient_accumulation_steps`.

    Raises:
        ConfigError: for an unknown key, or a value without its effect here.
    """
    given = dict(_as_mapping(args.accelerator_config))
    _check_keys(given)
    _settle_accumulation(args, given.get("gradient_accumulation_kwargs") or {})
    if given.get("use_configured_state"):
        use_configured_state(args)
    args.accelerator_config = AcceleratorConfig(**given)
    args.accelerator_config.pop("use_configured_state")


def check_accelerator(given: object) -> None:
    """Refuse (ConfigError) what an attribute of `accelerator_config` has been set to, if it has no effect."""
    _check_keys(_as_mapping(given))


def _check_keys(given: Mapping[str, Any]) -> None:
    known = [*_ALLOWED, *(one.name for one in fields(AcceleratorConfig) if one.name not in _ALLOWED)]
    for key, value in given.items():
        if key not in known:
            raise ConfigError(f"{_NAME} has no key {key!r}.{nearest(key, known)}")
        allowed, reason = _ALLOWED.get(key, ((value,), ""))
        if not any(value is one for one in allowed):
            remedy = reason or "use True or False"
            raise ConfigError(f"{_NAME}[{key!r}]={value!r} is not supported: {remedy}.")


def _as_mapping(given: Any) -> Mapping[str, Any]:
    if given is None:
        return {}
    if isinstance(given, str):
        given = _from_text(given)
    elif not isinstance(given, Mapping) and callable(getattr(given, "to_dict", None)) and not isinstance(given, type):
        given = given.to_dict()
    if not isinstance(given, Mapping):
        raise ConfigError(f"{_NAME} must be a dictionary or the path of a JSON file with one, got {given!r}.")
    return given


def _from_text(text: str) -> Any:
    rule = f"{_NAME} must be a dictionary or the path of a JSON file with one, got {text!r}"
    if text.lstrip().startswith("{"):
        return parse_json(text, rule, error=ConfigError)
    try:
        return read_json(text, error=ConfigError)
    except OSError as error:
        raise ConfigError(f"{rule} ({error}).") from error


def _settle_accumulation(args: Any, options: Any) -> None:
    name = f"{_NAME}['gradient_accumulation_kwargs']"
    if not isinstance(options, Mapping):
        raise ConfigError(f"{name} must be a dictionary, got {options!r}.")
    for key, value in options.items():
        if key not in _ACCUMULATION:
            raise ConfigError(f"{name} has no key {key!r}.{nearest(key, list(_ACCUMULATION))}")
        if key != "num_steps" and value is not _DEFAULTS[key]:
            raise ConfigError(f"{name}[{key!r}]={value!r} is not supported: {_ACCUMULATION[key]}.")
    steps = options.get("num_steps")
    if steps is None:
        return
    if args.gradient_accumulation_steps not in (1, steps):
        raise ConfigError(
            f"{name}['num_steps']={steps} contradicts gradient_accumulation_steps={args.gradient_accumulation_steps}; "
            "drop one of them."
        )
    args.gradient_accumulation_steps = steps
