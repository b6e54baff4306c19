"""A configuration from YAML and from `a.b=c` overrides, and back to YAML. Nothing that is read is executed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin

from onstep.config.keys import flat_types, leaves, typed_copy, unknown_key
from onstep.config.part import ConfigPart
from onstep.config.parts import ConfigContainer
from onstep.config.typed import accepts_text, coerce, field_types
from onstep.errors import ConfigError


class _Assignment(NamedTuple):
    part: ConfigPart
    name: str
    item: str | None
    """The entry of a dictionary field; None sets the field."""
    value: Any


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
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        values = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{source} is not a YAML configuration: {error}") from error
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


def _assignments(part: ConfigPart, values: Mapping[str, Any], prefix: str, known: list[str]) -> Iterator[_Assignment]:
    for key, value in values.items():
        head, dot, rest = str(key).partition(".")
        if head not in part.field_names():
            raise unknown_key(f"{prefix}{key}", known)
        current = getattr(part, head)
        if isinstance(current, ConfigPart):
            inner = {rest: value} if dot else value
            if not isinstance(inner, Mapping):
                raise ConfigError(f"{prefix}{head} is a section, got {value!r}; set its fields: {_some(current)}.")
            yield from _assignments(current, inner, f"{prefix}{head}.", known)
            continue
        annotation = field_types(type(part))[head]
        if not dot:
            yield _Assignment(part, head, None, coerce(value, annotation, f"{prefix}{head}"))
        elif get_origin(annotation) is dict:
            yield _Assignment(part, head, rest, coerce(value, get_args(annotation)[1], f"{prefix}{key}"))
        else:
            raise unknown_key(f"{prefix}{key}", known)


def _some(part: ConfigPart) -> str:
    names = part.field_names()
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


def _override_value(key: str, raw: str, known: Mapping[str, Any]) -> Any:
    """What the text after '=' means; for a field that holds text, `run.name=2024` stays text."""
    _refuse_interpolations(raw, f"the value of {key}")
    annotation = known.get(key)
    parent = known.get(key.partition(".")[0])
    if annotation is None and get_origin(parent) is dict:
        annotation = get_args(parent)[1]
    if annotation is None or not accepts_text(annotation):
        return _parse_value(key, raw)
    try:
        return coerce(_parse_value(key, raw), annotation, key)
    except ConfigError:
        return raw


def _parse_value(key: str, raw: str) -> Any:
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        parsed = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={raw}"]), resolve=False)
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{key}={raw!r} is not a YAML value: {error}") from error
    return parsed["value"] if isinstance(parsed, dict) else None


def _refuse_interpolations(value: Any, where: str) -> None:
    if isinstance(value, str) and "${" in value:
        raise ConfigError(f"{where} has the interpolation {value!r}; write the value itself: nothing is resolved here.")
    if isinstance(value, Mapping):
        for element in value.values():
            _refuse_interpolations(element, where)
    elif isinstance(value, list):
        for element in value:
            _refuse_interpolations(element, where)
