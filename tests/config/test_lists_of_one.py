"""A text where a list of texts is meant is a list of one: in YAML, in overrides and in dictionaries."""

from __future__ import annotations

from typing import get_args, get_origin

import pytest

from onstep.config import KEYS, ConfigContainer, apply_overrides, from_dict, parse_yaml
from onstep.config.field_types import accepts_text


def is_list_of_text(annotation: object) -> bool:
    return any(one == list[str] for one in (annotation, *get_args(annotation)))


LISTS = [name for name, key in KEYS.items() if is_list_of_text(key.annotation)]


def value(config: ConfigContainer, key: str) -> object:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


@pytest.mark.parametrize("key", LISTS)
def test_a_text_is_a_list_of_one(key: str) -> None:
    section, _, name = key.partition(".")
    by_override = ConfigContainer()
    apply_overrides(by_override, [f"{key}=one.txt"])
    expected = "one.txt" if accepts_text(KEYS[key].annotation) else ["one.txt"]
    assert value(by_override, key) == expected
    assert value(from_dict(parse_yaml(f"{section}: {{{name}: one.txt}}")), key) == expected
    assert value(from_dict({key: "one.txt"}), key) == expected


def test_these_are_the_keys() -> None:
    assert {"dataset.paths", "train.exit_signals", "peft.target_modules"} <= set(LISTS)
    assert all(get_origin(KEYS[key].annotation) is not dict for key in LISTS)
