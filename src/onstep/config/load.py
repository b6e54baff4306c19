"""A configuration by its dotted keys (`optimizer.lr`) and the rule of each, from YAML and overrides, and to YAML.

Nothing that is read is executed.
"""

from __future__ import annotations

import copy
import difflib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from onstep.config.part import ConfigPart, Option, accepts_text, coerce, field_types, nearest
from onstep.config.parts import ConfigContainer
from onstep.errors import ConfigError

Part = TypeVar("Part", bound=ConfigPart)

NEAR = 0.6
"""Least similarity (0 to 1) of a key that is worth suggesting."""

OTHER_NAMES = {
    "learning_rate": "optimizer.lr",
    "batch_size": "train.global_batch_size",
    "max_steps": "train.train_iters",
    "steps": "train.train_iters",
    "epochs": "train.num_epochs",
    "num_train_epochs": "train.num_epochs",
    "max_grad_norm": "optimizer.clip_grad",
    "warmup_steps": "scheduler.lr_warmup_iters",
    "precision": "mixed_precision",
    "output_dir": "run.output_dir",
    "device": "dist.device",
}
"""Names that people bring from elsewhere, and ours for the same thing."""

PRECISIONS = {
    "bf16_mixed": "bf16_mixed",
    "bf16-mixed": "bf16_mixed",
    "fp16_mixed": "fp16_mixed",
    "fp16-mixed": "fp16_mixed",
}
"""Spellings of `mixed_precision` and the one used inside."""


def leaves(config: ConfigPart, prefix: str = "") -> Iterator[tuple[str, ConfigPart, str]]:
    """Every value of a configuration as (dotted key, the part that holds it, field name), in order."""
    for name in config.field_names():
        value = getattr(config, name)
        if isinstance(value, ConfigPart):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", config, name


OPTIONS: dict[str, Option] = {
    key: type(part).__dataclass_fields__[name].metadata["option"] for key, part, name in leaves(ConfigContainer())
}
"""What each dotted key allows, and what changing it does."""


def to_flat(config: ConfigPart) -> dict[str, Any]:
    """Every value by its dotted key; lists and dictionaries are values and are copied."""
    return {key: copy.deepcopy(getattr(part, name)) for key, part, name in leaves(config)}


def flat_types(config: ConfigPart) -> dict[str, Any]:
    """The annotation of every value by its dotted key."""
    return {key: field_types(type(part))[name] for key, part, name in leaves(config)}


def typed_copy(config: Part) -> Part:
    """A deep copy in which every value has the type of its field.

    Raises:
        ConfigError: naming the key and the type of the first value that cannot.
    """
    typed = copy.deepcopy(config)
    for key, part, name in leaves(typed):
        setattr(part, name, coerce(getattr(part, name), field_types(type(part))[name], key))
    return typed


def diff(old: ConfigPart, new: ConfigPart) -> list[tuple[str, Any, Any]]:
    """What differs, as (dotted key, value in `old`, value in `new`), in the order of the fields."""
    before, after = to_flat(old), to_flat(new)
    return [(key, before.get(key), after.get(key)) for key in after | before if before.get(key) != after.get(key)]


def check_values(values: Mapping[str, Any]) -> None:
    """Check each value of a flat configuration on its own; None is checked nowhere.

    Raises:
        ConfigError: naming the key, the value and the rule.
    """
    for key, option in OPTIONS.items():
        value = values.get(key)
        if value is None:
            continue
        if isinstance(value, float) and not math.isfinite(value) and not (option.may_be_infinite and value > 0):
            raise ConfigError(f"{key}={value} must be a finite number.")
        if option.bound is not None and not option.bound.holds(value):
            raise ConfigError(f"{key}={value} must be {option.bound.text}.")
        if option.choices and value not in option.choices:
            raise not_a_choice(key, value, option.choices)
    precision, device = values.get("mixed_precision"), values.get("dist.device")
    if precision is not None and precision not in PRECISIONS:
        raise ConfigError(
            f"mixed_precision={precision!r} must be null (float32), 'bf16_mixed' or 'fp16_mixed'."
            f"{nearest(precision, list(PRECISIONS))}"
        )
    if device is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise ConfigError(f"dist.device={device!r} must be cpu, cuda, cuda:<n>, or null for CUDA where there is one.")


def not_a_choice(key: str, value: Any, choices: tuple[str, ...]) -> ConfigError:
    """The error for a value that is none of the choices; it names the nearest one."""
    hint = nearest(value, list(choices)) if isinstance(value, str) else ""
    return ConfigError(f"{key}={value!r} must be {' | '.join(choices)}.{hint}")


def nearest_key(key: str, known: list[str]) -> str | None:
    """The known dotted key that `key` most likely meant: by the whole key or by its last name, or None."""
    name = _last(key)
    synonym = OTHER_NAMES.get(name)
    if synonym in known and name not in map(_last, known):
        return synonym
    likeness = {}
    for candidate in known:
        whole = difflib.SequenceMatcher(None, key, candidate).ratio()
        last = difflib.SequenceMatcher(None, name, _last(candidate)).ratio()
        likeness[candidate] = max(whole, 0.95 * last), whole  # the likeness of the whole keys breaks ties
    best = max(likeness, key=likeness.__getitem__, default=None)
    return best if best is not None and likeness[best][0] >= NEAR else None


def load_yaml(path: str | Path) -> dict[str, Any]:
    """The values of a YAML file, by section.

    Raises:
        ConfigError: no such file, not YAML, a key given twice, no mapping, or a `${...}` interpolation.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {str(path)!r}: {error.strerror}.") from error
    return parse_yaml(text, source=str(path))


def parse_yaml(text: str, source: str = "the text") -> dict[str, Any]:
    """The values of YAML text, by section; `source` names the text in errors. Raises as `load_yaml`."""
    from omegaconf import OmegaConf

    with _yaml_errors(f"{source} is not a YAML configuration"):
        values = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    if not isinstance(values, dict):
        raise ConfigError(f"{source} must hold a mapping of sections, such as 'train: {{train_iters: 100}}'.")
    _refuse_interpolations(values, source)
    return {str(key): value for key, value in values.items()}


def merge(config: ConfigContainer, values: Mapping[str, Any]) -> None:
    """Set the values that `values` holds, by section or by dotted key; either all of them or none.

    A list or a dictionary replaces the one that was there; a dotted key below a dictionary (`env_vars.NAME`) sets one
    entry of it.

    Raises:
        ConfigError: an unknown key (with the nearest one) or a value of another type than the field's.
    """
    known = [key for key, _, _ in leaves(config)]
    for part, name, item, value in list(_assignments(config, values, "", known)):
        setattr(part, name, value if item is None else {**getattr(part, name), item: value})


def apply_overrides(config: ConfigContainer, overrides: Sequence[str]) -> None:
    """Set `section.field=value` items; the value is read as YAML (`3e-4`, `[a, b]`, `null`), or as it is for text.

    Raises:
        ConfigError: as `merge`, and for an item without '='.
    """
    known = flat_types(config)
    values: dict[str, Any] = {}
    for override in overrides:
        key, separator, raw = override.partition("=")
        if not separator:
            raise ConfigError(f"override {override!r} must have the form section.field=value, such as train.seed=1.")
        values[key.strip()] = _override_value(key.strip(), raw, known)
    merge(config, values)


def from_dict(values: Mapping[str, Any]) -> ConfigContainer:
    """A new configuration: the defaults, and `values` merged into them (see `merge`)."""
    config = ConfigContainer()
    merge(config, values)
    return config


def dump_yaml(config: ConfigContainer) -> str:
    """The configuration as YAML; `from_dict(parse_yaml(text))` gives an equal one."""
    from omegaconf import OmegaConf

    values = typed_copy(config).to_dict()
    _refuse_interpolations(values, "the configuration")
    return OmegaConf.to_yaml(OmegaConf.create(values))


def save_yaml(config: ConfigContainer, path: str | Path) -> None:
    """Write `dump_yaml(config)` to a file; its folder must exist."""
    Path(path).write_text(dump_yaml(config), encoding="utf-8")


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _assignments(
    part: ConfigPart, values: Mapping[str, Any], prefix: str, known: list[str]
) -> Iterator[tuple[ConfigPart, str, str | None, Any]]:
    """(part, field, entry of a dictionary or None for the whole field, value) of everything that is to be set."""
    for key, value in values.items():
        head, dot, rest = str(key).partition(".")
        if head not in part.field_names():
            raise _unknown_key(f"{prefix}{key}", known)
        current = getattr(part, head)
        if isinstance(current, ConfigPart):
            inner = {rest: value} if dot else value
            if not isinstance(inner, Mapping):
                names = current.field_names()
                some = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
                raise ConfigError(f"{prefix}{head} is a section, got {value!r}; set its fields: {some}.")
            yield from _assignments(current, inner, f"{prefix}{head}.", known)
            continue
        annotation = field_types(type(part))[head]
        if not dot:
            yield part, head, None, coerce(value, annotation, f"{prefix}{head}")
        elif get_origin(annotation) is dict:
            yield part, head, rest, coerce(value, get_args(annotation)[1], f"{prefix}{key}")
        else:
            raise _unknown_key(f"{prefix}{key}", known)


def _unknown_key(key: str, known: list[str]) -> ConfigError:
    near, heads = nearest_key(key, known), dict.fromkeys(key.partition(".")[0] for key in known)
    hint = f" Did you mean {near!r}?" if near else f" The top-level keys are {', '.join(heads)}."
    return ConfigError(f"unknown configuration key {key!r}.{hint}")


def _override_value(key: str, raw: str, known: Mapping[str, Any]) -> Any:
    """What the text after '=' means; for a field that holds text, `run.name=2024` stays text."""
    from omegaconf import OmegaConf

    _refuse_interpolations(raw, f"the value of {key}")
    annotation, parent = known.get(key), known.get(key.partition(".")[0])
    if annotation is None and get_origin(parent) is dict:
        annotation = get_args(parent)[1]
    holds_text = annotation is not None and accepts_text(annotation)
    try:
        with _yaml_errors(f"{key}={raw!r} is not a YAML value"):
            parsed = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={raw}"]), resolve=False)
        value = parsed["value"] if isinstance(parsed, dict) else None
        return coerce(value, annotation, key) if holds_text else value
    except ConfigError:
        if holds_text:
            return raw
        raise


@contextmanager
def _yaml_errors(problem: str) -> Iterator[None]:
    import yaml
    from omegaconf.errors import OmegaConfBaseException

    try:
        yield
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{problem}: {error}") from error


def _refuse_interpolations(value: Any, where: str) -> None:
    if isinstance(value, str) and "${" in value:
        raise ConfigError(f"{where} has the interpolation {value!r}; write the value itself: nothing is resolved here.")
    if isinstance(value, Mapping | list):
        for element in value.values() if isinstance(value, Mapping) else value:
            _refuse_interpolations(element, where)
