"""Reads a configuration from YAML, dictionaries and overrides, and writes it as YAML. Nothing in it is executed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args, get_origin

from onstep.config.bridge.own_values import own_value
from onstep.config.bridge.precision import MixedPrecisionConfig
from onstep.config.bridge.table import rule_of
from onstep.config.bridge.values import TARGET, check_target, comparable, plain, section_values
from onstep.config.container import ConfigContainer
from onstep.config.field_types import accepts_text, coerce, field_types
from onstep.config.keys import keys_of, leaves, nearest_key, typed_copy
from onstep.config.section import ConfigSection
from onstep.config.suggestions import listed, shown
from onstep.config.yaml_bounds import MAX_YAML_BYTES, check_yaml
from onstep.errors import ConfigError
from onstep.files.bounded_reading import read_bytes

logger = logging.getLogger(__name__)

_SILENT_SECONDS = 1.0
"""How long a pipe is waited for without a word."""


def load_yaml(path: str | Path) -> dict[str, Any]:
    """The values of a YAML file, by section.

    Args:
        path: the YAML file; a pipe is read to its end.

    Raises:
        ConfigError: no such file, not YAML, a key given twice, not a mapping, a `${...}` interpolation, or beyond the
            limits of `check_yaml`.
    """
    waiting = threading.Timer(_SILENT_SECONDS, logger.warning, ("waiting for what another process writes to %s", path))
    waiting.daemon = True
    waiting.start()
    try:
        text = read_bytes(path, MAX_YAML_BYTES, error=ConfigError, allows_pipe=True).decode("utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {str(path)!r}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"the configuration file {str(path)!r} is not UTF-8 text ({error}); save it as UTF-8."
        ) from None
    finally:
        waiting.cancel()
    return parse_yaml(text, source=str(path))


def parse_yaml(text: str, source: str = "the text") -> dict[str, Any]:
    """The values of YAML text, by section; `source` names the text in errors. Raises as `load_yaml`.

    Args:
        text: the YAML text.
    """
    import yaml
    from omegaconf import OmegaConf

    with _yaml_errors(f"{source} is not a YAML configuration", text):
        check_yaml(text, source)
        root = yaml.compose(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        if root is not None and root.tag.rpartition(":")[2] not in ("map", "null"):
            raise ConfigError(f"{source} must hold a mapping of sections, such as 'train: {{train_iters: 100}}'.")
        values = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def merge(config: ConfigContainer, values: Mapping[str, Any]) -> None:
    """Set the values that `values` holds, by section or by dotted key; either all of them or none.

    A list or a dictionary replaces the one that was there; a dotted key below a dictionary (`env_vars.NAME`) sets one
    entry of it.

    Args:
        config: the configuration, modified in place.

    Raises:
        ConfigError: an unknown key (with the nearest one) or a value of another type than the field's.
    """
    known = [key for key, _, _ in leaves(config)]
    _refuse_repetition(config, values)
    _refuse_values_of_bridge(list(_refused(config, values, "")))
    for section, name, item, value in list(_assignments(config, values, "", known)):
        setattr(section, name, value if item is None else {**getattr(section, name), item: value})
    config.settle()


def apply_overrides(config: ConfigContainer, overrides: Sequence[str]) -> dict[str, Any]:
    """Set `section.field=value` items; the value is read as YAML (`3e-4`, `[a, b]`, `null`), or literally for text.

    Args:
        config: the configuration, modified in place.
        overrides: words as `key=value`.

    Returns:
        The values by their keys.

    Raises:
        ConfigError: as `merge`, and for an item without '='.
    """
    known = {key: one.annotation for key, one in keys_of(type(config)).items()}
    values: dict[str, Any] = {}
    for override in overrides:
        key, separator, raw = override.partition("=")
        if not separator:
            raise ConfigError(
                f"override {shown(override)} must have the form section.field=value, such as train.seed=1."
            )
        values[key.strip()] = _override_value(key.strip(), raw, known)
    merge(config, values)
    return values


def from_dict(values: Mapping[str, Any]) -> ConfigContainer:
    """A new configuration: the defaults, and `values` merged into them (see `merge`)."""
    config = ConfigContainer()
    merge(config, values)
    return config


def dump_yaml(config: ConfigContainer) -> str:
    """The configuration as YAML; `from_dict(parse_yaml(text))` gives an equal one.

    Args:
        config: the configuration to write.
    """
    from omegaconf import OmegaConf

    values = typed_copy(config).to_dict()
    if config.fsdp.wrap is not None:
        values["fsdp"]["wrap"] = [str(name) for name in values["fsdp"]["wrap"]]
    _refuse_interpolations(values, "the configuration")
    return OmegaConf.to_yaml(OmegaConf.create(values))


def save_yaml(config: ConfigContainer, path: str | Path) -> None:
    """Write `dump_yaml(config)` to a file; its directory must exist.

    Args:
        path: the file to write.
    """
    Path(path).write_text(dump_yaml(config), encoding="utf-8")


def _assignments(
    section: ConfigSection, values: Mapping[str, Any], prefix: str, known: list[str]
) -> Iterator[tuple[ConfigSection, str, str | None, Any]]:
    """(section, field, entry of a dictionary or None for the whole field, value) for everything to be set."""
    place = prefix.rstrip(".")
    check_target(place, values)
    if place == "peft" and TARGET in values:
        yield section, "peft_scheme", None, "lora"
    for key, value in section_values(place, values).items():
        head, dot, rest = str(key).partition(".")
        if head not in section.field_names():
            if dot or rule_of(type(section), head) is None:
                raise unknown_key(f"{prefix}{key}", known)
            yield section, head, None, plain(value)
            continue
        current = getattr(section, head)
        if isinstance(current, ConfigSection):
            inner = {rest: value} if dot else value
            if not isinstance(inner, Mapping):
                names = current.field_names()
                some = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
                raise ConfigError(f"{prefix}{head} is a section, got {shown(value)}; set its fields: {some}.")
            yield from _assignments(current, inner, f"{prefix}{head}.", known)
            continue
        annotation = field_types(type(section))[head]
        if not dot:
            spelled = own_value(section, head, value)
            is_object = isinstance(spelled, MixedPrecisionConfig)
            yield section, head, None, spelled if is_object else coerce(spelled, annotation, f"{prefix}{head}")
        elif get_origin(annotation) is dict:
            yield section, head, rest, coerce(value, get_args(annotation)[1], f"{prefix}{key}")
        else:
            raise unknown_key(f"{prefix}{key}", known)


def _refused(section: ConfigSection, values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, ConfigError]]:
    """The keys of Megatron Bridge whose values are not supported, each with its error."""
    for key, value in values.items():
        head, dot, rest = str(key).partition(".")
        if head in section.field_names():
            inner = getattr(section, head)
            if isinstance(inner, ConfigSection) and (dot or isinstance(value, Mapping)):
                yield from _refused(inner, {rest: value} if dot else value, f"{prefix}{head}.")
        elif not dot and (rule := rule_of(type(section), head)) is not None and not rule.takes(value):
            try:
                rule.check(f"{prefix}{key}", value)
            except ConfigError as error:
                yield f"{prefix}{key}={shown(comparable(value))}", error


def _refuse_values_of_bridge(refused: Sequence[tuple[str, ConfigError]]) -> None:
    """Raise the first error, with the other keys."""
    if refused:
        (_, error), *others = refused
        also = f" Also not supported: {listed([text for text, _ in others], 8)}." if others else ""
        raise ConfigError(f"{error}{also}") from None


def _refuse_repetition(config: ConfigContainer, values: Mapping[str, Any]) -> None:
    """Refuse a key that is set on its own and within its section, and an entry beside its whole dictionary."""
    for key in map(str, values):
        head, dot, rest = key.partition(".")
        whole = values.get(head) if dot else None
        if isinstance(whole, Mapping) and (rest in whole or not isinstance(getattr(config, head, None), ConfigSection)):
            raise ConfigError(
                f"{shown(key)} is set twice, on its own and by {head}={shown(whole)}; write both in one place."
            )


def unknown_key(key: str, known: list[str]) -> ConfigError:
    """The error for a key that does not exist; it names the nearest one, else the top-level keys."""
    near, heads = nearest_key(key, known), dict.fromkeys(key.partition(".")[0] for key in known)
    hint = f" Did you mean {near!r}?" if near else f" The top-level keys are {', '.join(heads)}."
    return ConfigError(f"unknown configuration key {shown(key)}.{hint}")


def _override_value(key: str, raw: str, known: Mapping[str, Any]) -> Any:
    """The value of the text after '='; for a field that holds text, `run.name=2024` stays text."""
    from omegaconf import OmegaConf

    _refuse_interpolations(raw, f"the value of {key}")
    annotation, parent = known.get(key), known.get(key.partition(".")[0])
    if annotation is None and get_origin(parent) is dict:
        annotation = get_args(parent)[1]
    holds_text = annotation is not None and accepts_text(annotation)
    try:
        with _yaml_errors(f"{key}={shown(raw)} is not a YAML value", raw):
            check_yaml(raw, f"the value of {key}")
            parsed = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={raw}"]), resolve=False)
        value = parsed["value"] if isinstance(parsed, dict) else None
        return coerce(value, annotation, key) if holds_text else value
    except ConfigError:
        if holds_text:
            return raw
        raise


@contextmanager
def _yaml_errors(problem: str, text: str) -> Iterator[None]:
    from omegaconf.errors import KeyValidationError

    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        mark: Any = getattr(error, "problem_mark", None)
        line = "" if mark is None else "".join(text.splitlines()[mark.line : mark.line + 1])
        if "\t" in line[: len(line) - len(line.lstrip())]:
            raise ConfigError(
                f"{problem}: line {mark.line + 1} is indented with a tab; YAML requires spaces."
            ) from error
        reason = str(error).partition("\n    full_key:")[0][:1000]
        if isinstance(error, KeyValidationError):
            reason += "; a key must be text"
        raise ConfigError(f"{problem}: {reason or type(error).__name__}") from error


def _refuse_interpolations(value: Any, where: str) -> None:
    if isinstance(value, str) and "${" in value:
        raise ConfigError(
            f"{where} has the interpolation {shown(value)}, which is not resolved; write the value itself."
        )
    if isinstance(value, Mapping | list):
        for element in value.values() if isinstance(value, Mapping) else value:
            _refuse_interpolations(element, where)
