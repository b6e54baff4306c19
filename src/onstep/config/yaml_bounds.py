"""Checks YAML text before it is loaded: how large and how deep its value becomes, and that it is plain data."""

from __future__ import annotations

import re
from typing import Any, NoReturn

from onstep.config.suggestions import shown
from onstep.errors import ConfigError
from onstep.files.bounded_reading import MAX_DIGITS

MAX_YAML_BYTES = 1 << 20
"""Limit for a configuration file; one with every key has about 10 kB."""
MAX_VALUES = 10_000
"""Limit for keys and values, those that aliases repeat included."""
MAX_LEVELS = 32
"""Limit for the nesting of lists and mappings."""
_CORE = "tag:yaml.org,2002:"
_TAGS = {None, "!", *(f"{_CORE}{name}" for name in ("str", "int", "float", "bool", "null", "seq", "map"))}
_SCALARS = {f"{_CORE}{name}" for name in ("int", "float", "bool")}
_NUMBER = re.compile(r"[-+]?\.?[0-9_][-+0-9a-fA-FoxOX_:.]*")


def check_yaml(text: str, source: str) -> None:
    """Check YAML text without building its value, in time proportional to its length.

    Args:
        source: names the text in error messages.

    Raises:
        ConfigError: for a value beyond the limits, an alias inside its own value, a tag of another type than plain
            data, or a `${...}` interpolation.
        yaml.YAMLError: if the text is not YAML.
    """
    import yaml

    sizes: dict[Any, int] = {}
    """Number of keys and values of each anchor."""
    around: list[tuple[str | None, int]] = [(None, 0)]
    """Anchor and number of values so far of the text and of each list and mapping that is open."""
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        if isinstance(event, yaml.CollectionStartEvent):
            _check_tag(event.tag, source)
            around.append((event.anchor, 1))
            if len(around) > MAX_LEVELS + 1:
                _refuse(source, f"is nested more deeply than the limit of at most {MAX_LEVELS} levels; flatten it")
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, size = around.pop()
        elif isinstance(event, yaml.ScalarEvent):
            _check_scalar(event, source)
            anchor, size = event.anchor, 1
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in sizes and any(event.anchor == one for one, _ in around):
                _refuse(source, f"has the alias *{shown(event.anchor)} in a value that contains itself; write it out")
            anchor, size = None, sizes.get(event.anchor or "", 1)
        else:
            continue
        if anchor is not None:
            sizes[anchor] = size
        around[-1] = (around[-1][0], around[-1][1] + size)
        if around[-1][1] > MAX_VALUES:
            _refuse(
                source, f"has too many keys and values, those of aliases included; at most {MAX_VALUES:,} are allowed"
            )


def _check_scalar(event: Any, source: str) -> None:
    import yaml

    _check_tag(event.tag, source)
    value: str = event.value
    if "${" in value:
        raise ConfigError(
            f"{source} has the interpolation {shown(value)}, which is not resolved; write the value itself."
        )
    is_text = event.tag in ("!", f"{_CORE}str") or (event.tag is None and event.style)
    if len(value) > MAX_DIGITS and not is_text and _NUMBER.fullmatch(value):
        line = event.start_mark.line + 1
        _refuse(source, f"has a number of {len(value):,} characters in line {line}; at most {MAX_DIGITS} are allowed")
    if event.tag in _SCALARS:
        try:
            yaml.SafeLoader("").construct_object(yaml.ScalarNode(event.tag, value))
        except (ValueError, LookupError):
            kind, line = event.tag.removeprefix(_CORE), event.start_mark.line + 1
            _refuse(source, f"has {shown(value)} in line {line}, which is not of its tag !!{kind}; correct it")


def _check_tag(tag: str | None, source: str) -> None:
    if tag not in _TAGS:
        _refuse(source, f"has the tag {shown(tag)}, but only plain values are read; drop the tag")


def _refuse(source: str, reason: str) -> NoReturn:
    raise ConfigError(f"{source} {reason}.")
