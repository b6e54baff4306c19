"""Changes of JSON and YAML as values: any node becomes something that its reader did not expect."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import yaml

Place = tuple[Any, Any]
"""A list or an object, and the index or key of one of its values."""

_DEPTHS = (50, 500, 100_000)
_STRINGS = (
    "", " ", "\u0000", "\ud800", "\u202e\ufeff", "\x1b[31m", "0", "-1", "1e5", "nan", "null", "True", "__class__",
    "__init__", "__dict__", "../../../etc/passwd", "/dev/zero", "/dev/null", "/", ".", "~", "%s%n{0}", "${oc.env:HOME}",
    "x" * 300, "x" * 10_000, "\u00e9" * 1_000_000,
)  # fmt: skip
_NUMBERS = (
    "0", "-0", "1", "-1", "2", "255", "256", "65536", "2147483647", "2147483648", "4294967296", "9007199254740993",
    "9223372036854775807", "9223372036854775808", "-9223372036854775809", "18446744073709551616", "1" + "0" * 400,
    "-1" + "0" * 400, "1" + "0" * 5000, "0.5", "-0.0", "1e-320", "1e308", "-1e308", "1e400", "NaN", "Infinity",
    "-Infinity",
)  # fmt: skip
_NAMES = ("", "__class__", "__init__", "__dict__", "self", "cls", "kwargs", "\u0000", "a b", "1", "x" * 10_000)
_YAML = (
    "!!python/object/apply:os.system ['true']", "!!python/name:os.system", "!!binary '='", "!!set {a, b}",
    "!!omap [a: 1]", "!!timestamp 2001-02-30", "2001-01-01", "2001-12-14t21:59:43.10-05:00", "0x7fffffffffffffff",
    "1_000", "0o17", "017", "1:30", ".nan", ".inf", "-.inf", "~", "yes", "&a [*a]", "*unknown", "&a {b: *a}",
    "{? [1, 2] : 3}", "{<<: 1}", "{<<: {a: 1}}", "${model.num_layers}", "${oc.env:HOME}", "${oc.decode:1}", "${", "???",
    "'\\ud800'", '"\\ud800"', '"\\x00"', "| \n text", "> text", "!unknown x", "@x", "`x`", "%x", "{a: 1, a: 2}",
    "{a: &a [x, x, x, x, x, x, x, x], b: &b [*a, *a, *a, *a, *a, *a, *a, *a], c: &c [*b, *b, *b, *b, *b, *b, *b, *b], "
    "d: &d [*c, *c, *c, *c, *c, *c, *c, *c], e: &e [*d, *d, *d, *d, *d, *d, *d, *d], "
    "f: &f [*e, *e, *e, *e, *e, *e, *e, *e], g: &g [*f, *f, *f, *f, *f, *f, *f, *f], "
    "h: [*g, *g, *g, *g, *g, *g, *g, *g]}",
)  # fmt: skip


def strange_json(random: Random) -> tuple[str, str]:
    """What it is, and the JSON text of a value that few readers expect."""
    kind = random.choices(("constant", "number", "string", "container", "deep", "long"), (3, 6, 5, 4, 2, 1))[0]
    if kind == "constant":
        return _named(random.choice(("null", "true", "false")))
    if kind == "number":
        return _named(random.choice(_NUMBERS))
    if kind == "string":
        return _named(json.dumps(random.choice(_STRINGS)))
    if kind == "container":
        return _named(
            random.choice(("[]", "{}", "[[]]", "[null]", "[0]", '[""]', '{"": null}', '{"__class__": 1}', "[{}]"))
        )
    if kind == "deep":
        depth = random.choice(_DEPTHS)
        opening, closing = random.choice((("[", "]"), ('{"a":', "}"), ('[{"a":', "}]")))
        inner = "" if opening == "[" else "0"
        return f"{depth} times {opening!r}", opening * depth + inner + closing * depth
    count = random.choice((1000, 100_000))
    return f"a list of {count} numbers", "[" + ",".join(["7"] * count) + "]"


def change_json(text: str, random: Random, *, indent: int | None = None) -> tuple[str, str]:
    """One to three changes of a JSON text; what was done, and the new text."""
    if random.random() < 0.02:
        return strange_json(random)
    done, value, raw = _changed(json.loads(text), random, strange_json)
    return done, _filled_in(json.dumps(value, indent=indent, ensure_ascii=False), raw)


def change_yaml(text: str, random: Random) -> tuple[str, str]:
    """One to three changes of a YAML text; what was done, and the new text."""
    if random.random() < 0.02:
        return strange_yaml(random)
    done, value, raw = _changed(yaml.safe_load(text), random, strange_yaml)
    return done, _filled_in(yaml.safe_dump(value, allow_unicode=True, sort_keys=False, width=1 << 30), raw)


def strange_yaml(random: Random) -> tuple[str, str]:
    """What it is, and the text of a value in YAML's flow style."""
    return _named(random.choice(_YAML)) if random.random() < 0.5 else strange_json(random)


def _named(text: str) -> tuple[str, str]:
    return text if len(text) < 60 else f"{text[:30]}... of {len(text)} characters", text


_Strange = Callable[[Random], tuple[str, str]]


def _changed(value: Any, random: Random, strange: _Strange) -> tuple[str, Any, list[str]]:
    """What was done, the value with placeholders, and the text to put in the place of each."""
    raw: list[str] = []

    def placeholder(text: str) -> str:
        raw.append(text)
        return f"\ue000{len(raw) - 1}\ue001"

    done = []
    holder = [value]
    kinds = random.choice((_KINDS, _KINDS, _GENTLE))
    for _ in range(random.choices((1, 2, 3), (6, 2, 1))[0]):
        container, key = _place(holder, random)
        kind = random.choices(list(kinds), list(kinds.values()))[0]
        what = _change_at(container, key, kind, random, strange, placeholder)
        done.append(f"{str(key)[:40]!r}: {what}")
    return "; ".join(done), holder[0], raw


def _filled_in(text: str, raw: list[str]) -> str:
    for number, replacement in enumerate(raw):
        for mark in (f'"\ue000{number}\ue001"', f"'\ue000{number}\ue001'", f"\ue000{number}\ue001"):
            text = text.replace(mark, replacement)
    return text


def _place(holder: list[Any], random: Random) -> Place:
    """Any value: of all values alike, or by going down at random, which finds those near the top."""
    if random.random() < 0.4:
        return random.choice(list(_places(holder)))
    container, key = holder, 0
    while (
        isinstance(container[key], (dict, list)) and container[key] and (container is holder or random.random() < 0.75)
    ):
        container = container[key]
        key = random.choice(list(container) if isinstance(container, dict) else range(len(container)))
    return container, key


def _places(container: Any) -> Iterator[Place]:
    for key in list(container) if isinstance(container, dict) else range(len(container)):
        yield container, key
        if isinstance(container[key], (dict, list)):
            yield from _places(container[key])


_KINDS = {"strange": 8, "twin": 3, "tweak": 4, "remove": 3, "rename": 2, "add": 2, "repeat a name": 1, "swap": 1}
"""What is done to a value, and how often."""
_GENTLE = {"tweak": 8, "remove": 1, "swap": 2}
"""The same where a reader that checks types is to get further: most values keep theirs."""


def _change_at(
    container: Any, key: Any, kind: str, random: Random, strange: _Strange, placeholder: Callable[[str], str]
) -> str:
    old = container[key]
    is_object = isinstance(container, dict)
    if kind == "remove":
        del container[key]
        if isinstance(container, list) and not container:
            container.append(None)
        return "removed"
    if kind == "rename" and is_object:
        name = random.choice((*_NAMES, f"{key}2", str(key).upper()))
        container[name] = container.pop(key)
        return f"renamed to {name[:30]!r}"
    if kind == "add" and is_object:
        name = random.choice((*_NAMES, "unknown", "_target_", "auto_map"))
        what, text = strange(random)
        container[name] = placeholder(text)
        return f"{name[:30]!r} added beside it: {what}"
    if kind == "repeat a name" and is_object and isinstance(key, str):
        what, text = strange(random)
        container[key] = placeholder(f"{text}, {json.dumps(key)}: {text}")
        return f"twice: {what}"
    if kind == "swap":
        other, name = _place([container], random)
        if other is not container or name != key:
            container[key] = _copied(other[name])
            return f"replaced by its neighbor {str(name)[:30]!r}"
    if kind == "twin":
        container[key] = _twin(old)
        return f"{type(old).__name__} became {type(container[key]).__name__}"
    if kind == "tweak":
        container[key] = _tweaked(old, random)
        return f"became {str(container[key])[:30]!r}"
    what, text = strange(random)
    container[key] = placeholder(text)
    return what


def _copied(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))


def _twin(value: Any) -> Any:
    """The same in another type."""
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, int):
        return float(value) if value % 2 else str(value)
    if isinstance(value, float):
        return str(value)
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        return {str(index): one for index, one in enumerate(value)}
    return list(value.values())


def _tweaked(value: Any, random: Random) -> Any:
    """A value of the same type, not far away."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        near = (value + 1, value - 1, -value, value * 2, value * 1000, 0, -1)
        return random.choice((*near, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63))
    if isinstance(value, float):
        return random.choice((value + 1, value - 1, -value, value * 2, value * 1000, 0.0, 1e308, -1e308, 1e-320))
    if isinstance(value, str):
        near = (value + "x", value[1:], value.upper(), value * 2, value.replace("/", "//"), value + "\n", value[::-1])
        return random.choice((*near, *near, "", random.choice(_STRINGS)))
    if isinstance(value, list):
        return random.choice(
            (value[1:], value[:-1], value[::-1], value + value[:1], value * 300 if len(value) < 9 else [], [])
        )
    if isinstance(value, dict):
        return dict(list(value.items())[random.randrange(2) :: 2])
    return random.choice(([], {}, 0))
