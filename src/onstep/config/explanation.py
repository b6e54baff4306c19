"""The keys of a configuration as text: the common ones with their help, and one with everything about it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping

from onstep.config.bridge.rules import Rule
from onstep.config.bridge_outcomes import rules
from onstep.config.field_types import type_name
from onstep.config.keys import KEYS, Key
from onstep.config.load import unknown_key
from onstep.config.section import ChangeClass

WIDTH = 120
"""Columns of the text."""


def explain(name: str, keys: Mapping[str, Key] = KEYS) -> str:
    """Everything that is known about a key: help, type, default, rules, consequence of a change, other names.

    Of a section, its keys with the first sentence of their help; of a key of Megatron Bridge, what it sets, or which
    values are accepted and why.

    Args:
        name: a dotted key, or the name of a section.
        keys: the known keys by their dotted names.

    Raises:
        ConfigError: for an unknown key, with the nearest one.
    """
    if name not in keys:
        rule = dict(rules()).get(name) if keys is KEYS else None
        if rule is not None:
            return _of_bridge(name, rule)
        of_section = [key for key in keys.values() if key.name.startswith(f"{name}.")]
        if not of_section:
            raise unknown_key(name, list(keys))
        return "\n".join([f"{name}: a section of {len(of_section)} keys", *map(_one_line, of_section)])
    key = keys[name]
    rows = dict(_info(key, keys))
    width = max(map(len, rows)) + 2
    indent = " " * (width + 2)
    lines = [
        textwrap.fill(f"  {label:{width}}{text}", WIDTH, subsequent_indent=indent, break_long_words=False)
        for label, text in rows.items()
    ]
    return "\n".join([name, textwrap.fill(key.option.help, WIDTH, initial_indent="  ", subsequent_indent="  "), *lines])


def _of_bridge(name: str, rule: Rule) -> str:
    sets = f"sets {', '.join(rule.becomes)}" if rule.becomes else "has no effect"
    accepted = f"must be {' or '.join(rule.written)}" if rule.written else "accepts any value"
    text = f"a key of Megatron Bridge, which {sets} and {accepted}{f': {rule.why}' if rule.why else ''}."
    remedy = f" Instead of another value, {rule.remedy}." if rule.remedy else ""
    return f"{name}\n" + textwrap.fill(text + remedy, WIDTH, initial_indent="  ", subsequent_indent="  ")


def _one_line(key: Key) -> str:
    text = textwrap.shorten(f"{key.name}: {_first_sentence(key.option.help)}", WIDTH - 2, placeholder=" ...")
    return f"  {text}"


def _info(key: Key, keys: Mapping[str, Key]) -> Iterator[tuple[str, str]]:
    option = key.option
    yield "type", type_name(key.annotation)
    yield "default", yaml_value(key.default)
    if option.bound is not None:
        yield "must be", option.bound.text
    if option.choices:
        yield "choices", " | ".join(option.choices)
    if option.elements:
        yield "elements", " | ".join(option.elements)
    if option.only_with:
        yield "only with", option.only_with
    if key.needs:
        yield "requires", "; ".join(need.partition("; ")[0] for need in key.needs)
    changed = option.on_change.value
    yield "if changed", f"{changed}: {key.effect}" if option.on_change is ChangeClass.TRAJECTORY else changed
    for entry, kind in (option.entries or {}).items():
        yield f"{entry} changed", kind.value
    if option.hf:
        yield "TrainingArguments", option.hf
    names = [name for name in option.known_as if name != option.hf]
    if names:
        yield "elsewhere", ", ".join(names)


def yaml_value(value: object) -> str:
    """A value as YAML on one line."""
    import yaml

    return yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("...\n").strip()


def common_defaults(keys: Mapping[str, Key] = KEYS) -> str:
    """The keys that most runs set with their defaults, as YAML with their help as comments."""
    common = [key for key in keys.values() if key.option.common]
    lines = [
        f"# The {len(common)} keys that most runs set, of {len(keys)}; all of them: onstep config defaults --help-text",
        "# Everything about one of them: onstep config explain KEY",
    ]
    return "\n".join([*lines, *_commented(common, WIDTH)]) + "\n"


def all_defaults(keys: Mapping[str, Key] = KEYS) -> str:
    """Every key with its default, as YAML with a line of help as a comment."""
    lines = [f"# All {len(keys)} keys. Everything about one of them: onstep config explain KEY"]
    return "\n".join([*lines, *_commented(keys.values(), None)]) + "\n"


def _commented(keys: Iterable[Key], width: int | None) -> list[str]:
    """The keys as YAML, by section, each below the first sentence of its help; without a width, on one line."""
    lines: list[str] = []
    section = ""
    for key in keys:
        head, _, name = key.name.rpartition(".")
        if head != section:
            section = head
            lines += [f"{section}:"] if section else []
        indent = "  " if section else ""
        text, comment = _first_sentence(key.option.help), f"{indent}# "
        wrapped = textwrap.wrap(text, width or len(comment + text), initial_indent=comment, subsequent_indent=comment)
        lines += [*wrapped, f"{indent}{name}: {yaml_value(key.default)}"]
    return lines


def _first_sentence(text: str) -> str:
    sentence, dot, _ = text.partition(". ")
    return sentence + dot.strip() if dot else text
