"""Hypothesis strategies for changes of a file: of its bytes, and of the values that its format has."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from blake3 import blake3
from hypothesis import strategies as st

MOST_INSERTED = 1 << 20
SPARSE_BYTES = 3 << 30
ENDLESS_BYTES = 200 << 20
RUNS_WITHOUT_END = (None, b"a", b"[", b"1", b'{"a": 1}')

_RUNS = (
    b"\0",
    b"\xff",
    b"\xc3\x28",
    b"\xed\xa0\x80",
    b"\xef\xbb\xbf",
    b"\x1b[2J",
    b"[",
    b"{",
    b'"',
    b"\\",
    b"\n",
    b"9",
)
"""Among them: NUL, bytes that are not UTF-8, a surrogate, a byte order mark, an escape sequence of a terminal."""
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
_INTEGERS = (0, 1, -1, 2, 7, 255, 2**15, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1, -(2**31), -(2**63))
_NAMES = (
    "", "__class__", "__init__", "__dict__", "self", "cls", "kwargs", "\u0000", "a b", "1", "x" * 10_000, "unknown",
    "_target_", "auto_map",
)  # fmt: skip
_CONTAINERS = ("[]", "{}", "[[]]", "[null]", "[0]", '[""]', '{"": null}', '{"__class__": 1}', "[{}]")
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
_TEMPLATES = (
    "{{ 1 / 0 }}", "{{ 'x' * 10 ** 10 }}", "{{ 10 ** 10 ** 8 }}", "{% for i in range(10 ** 9) %}x{% endfor %}",
    "{% for i in range(99999999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ messages.__class__.__mro__ }}", "{{ ''.__class__ }}",
    "{{ raise_exception('no') }}", "{{ raise_exception(messages) }}", "{{ messages[99] }}", "{{ messages | unknown }}",
    "{{ unknown() }}", "{{ unknown.name.name }}", "{% include 'x' %}", "{% import 'x' as y %}",
    "{{ messages | tojson(indent=10**9) }}", "{{ '%s' % messages }}", "{{ '%9999999999d' % 1 }}",
    "{{ '{:>9999999999}'.format(1) }}", "{% set x = namespace(a=messages) %}{% set x.a = x %}{{ x.a }}",
    "{% generation %}", "{% endgeneration %}", "{% generation %}x{% endgeneration %}", "{% endfor %}", "{% if %}", "{{",
    "%}", "{#", "{{ range(10 ** 12) | list }}", "{{ messages | map(attribute='content') | join('x' * 10 ** 9) }}",
    "{{ strftime_now('%Y' * 10 ** 7) }}", "{% for a in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "{{ messages[0].content.zfill(10 ** 10) }}", "{{ messages.append(1) }}", "{{ '\\ud800' }}",
    "{{ eos_token * 1000 }}", "{{ [0] * 10 ** 10 }}", "{{ 'a'.center(10**10) }}", "{{ lipsum(10**6) }}",
    "{% if not true %}", "{{ messages | batch(0) | list }}", "{{ 7 | round(10**9) }}", "{{ 'x' | indent(10**10) }}",
    "{{ 'x y' | wordwrap(0) }}", "{{ 'x' | center(10**10) }}", "{{ messages | groupby('none') }}",
    "{{ messages | sort }}", "{{ '1' | int('x') + [] }}", "{% break %}",
)  # fmt: skip


@dataclass(frozen=True)
class Bytes:
    """Some bytes are removed, and others inserted in their place."""

    at: float
    """Share of the content before them."""
    removed: int
    inserted: bytes | None
    """None: those that were removed."""
    times: int

    def __call__(self, content: bytes) -> bytes:
        start = round(self.at * len(content))
        end = start + self.removed
        inserted = content[start:end] if self.inserted is None else self.inserted
        times = min(self.times, MOST_INSERTED // max(1, len(inserted)))
        return content[:start] + inserted * times + content[end:]


_MARK = "\ue000"


def _change_value(draw: st.DrawFn, text: str, texts: st.SearchStrategy[str], *, indent: int | None = None) -> str:
    """A JSON text, or a YAML text if `texts` are, with one of its values changed."""
    is_yaml = texts is YAML_TEXTS
    holder = [yaml.safe_load(text) if is_yaml else json.loads(text)]
    by_depth: dict[int, list[tuple[Any, Any]]] = {}
    for container, key, depth in _places(holder):
        by_depth.setdefault(depth, []).append((container, key))
    container, key = draw(st.one_of([st.sampled_from(places) for places in by_depth.values()]))
    acts = _OF_MEMBERS if isinstance(container, dict) else _OF_ITEMS
    replacement = _act(draw, draw(st.sampled_from(acts)), container, key, texts)
    if not holder:
        return replacement
    if is_yaml:
        shown = yaml.safe_dump(holder[0], allow_unicode=True, sort_keys=False, width=1 << 30)
    else:
        shown = json.dumps(holder[0], indent=indent, ensure_ascii=False)
    for mark in (f'"{_MARK}"', f"'{_MARK}'", _MARK):
        shown = shown.replace(mark, replacement)
    return shown


_OF_ITEMS = (*["new"] * 5, "near", "twin", "remove")
_OF_MEMBERS = (*_OF_ITEMS, "rename", "add", "repeat", "swap")


def _act(draw: st.DrawFn, act: str, container: Any, key: Any, texts: st.SearchStrategy[str]) -> str:
    """Change a value in its list or object; the text for where a mark was left."""
    old = container[key]
    if act == "near":
        container[key] = draw(st.sampled_from(_near(old)))
    elif act == "twin":
        container[key] = _twin(old)
    elif act == "remove":
        del container[key]
    elif act == "rename":
        container[draw(st.sampled_from(_NAMES))] = container.pop(key)
    elif act == "swap":
        container[key] = json.loads(json.dumps(container[draw(st.sampled_from([*container]))], default=str))
    else:
        text = draw(texts)
        container[draw(st.sampled_from(_NAMES)) if act == "add" else key] = _MARK
        return f"{text}, {json.dumps(key)}: {text}" if act == "repeat" else text
    return ""


def _places(container: Any, depth: int = 0) -> Iterator[tuple[Any, Any, int]]:
    """Each value below a container: where it is, its index or key there, and its depth."""
    for key in list(container) if isinstance(container, dict) else range(len(container)):
        yield container, key, depth
        if isinstance(container[key], (dict, list)):
            yield from _places(container[key], depth + 1)


def _twin(value: Any) -> Any:
    """The same in another type."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        return {str(index): one for index, one in enumerate(value)}
    if isinstance(value, dict):
        return list(value.values())
    return float(value) if type(value) is int and value % 2 else str(value)


def _near(value: Any) -> list[Any]:
    """Values of the same type, not far away."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value - 1, -value, value * 2, value * 1000, *_INTEGERS]
    if isinstance(value, float):
        return [value + 1, value - 1, -value, value * 2, value * 1000, 0.0, 1e308, -1e308, 1e-320]
    if isinstance(value, str):
        near = [value + "x", value[1:], value.upper(), value * 2, value.replace("/", "//"), value + "\n", value[::-1]]
        return near + list(_STRINGS)
    if isinstance(value, list):
        return [value[1:], value[:-1], value[::-1], value + value[:1], value * 300 if len(value) < 9 else [], []]
    if isinstance(value, dict):
        return [dict(list(value.items())[start::2]) for start in (0, 1)]
    return [[], {}, 0]


def _deep(depth: int, opening: str, closing: str) -> str:
    return opening * depth + ("" if opening == "[" else "0") + closing * depth


JSON_TEXTS = st.one_of(
    st.sampled_from(("null", "true", "false", "7", "0.5")),
    st.sampled_from(_NUMBERS),
    st.sampled_from(_STRINGS).map(json.dumps),
    st.sampled_from(_CONTAINERS),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=5,
    ).map(json.dumps),
    st.builds(
        lambda depth, pair: _deep(depth, *pair),
        st.sampled_from((50, 500, 100_000)),
        st.sampled_from((("[", "]"), ('{"a":', "}"), ('[{"a":', "}]"))),
    ),
    st.sampled_from((1000, 100_000)).map(lambda count: "[" + ",".join(["7"] * count) + "]"),
)
YAML_TEXTS = st.sampled_from(_YAML) | JSON_TEXTS

_INSERTED = st.sampled_from(_RUNS) | st.binary(min_size=1, max_size=64)
_BYTES = st.one_of(
    st.builds(Bytes, st.floats(0, 0.99), st.sampled_from((1, 4, 64, 1 << 40)), st.just(b""), st.just(1)),
    st.builds(Bytes, st.floats(0, 1), st.integers(0, 4), _INSERTED, st.sampled_from((1, 2, 7, 1000, 20_000))),
    st.builds(Bytes, st.floats(0, 0.99), st.sampled_from((4, 64, 4000)), st.none(), st.sampled_from((2, 5, 100))),
)
"""Some are removed, replaced, repeated."""


def _json(draw: st.DrawFn, content: bytes) -> bytes:
    text = content.decode()
    for _ in range(draw(st.sampled_from((1, 1, 2)))):
        with suppress(ValueError, RecursionError):  # the first change may have made a text that cannot be read
            text = _change_value(draw, text, JSON_TEXTS, indent=2)
    return text.encode("utf-8", "surrogatepass")


def _yaml(draw: st.DrawFn, content: bytes) -> bytes:
    return _change_value(draw, content.decode(), YAML_TEXTS).encode("utf-8", "surrogatepass")


def _records(draw: st.DrawFn, content: bytes) -> bytes:
    """One JSON value per line, with or without the brackets and commas of a list."""
    lines = content.split(b"\n")
    chosen = [number for number, line in enumerate(lines) if line.strip(b" ,\r").startswith(b"{")]
    first, second = draw(st.sampled_from(chosen)), draw(st.sampled_from(chosen))
    act = draw(st.sampled_from(("record", "record", "records", "repeat", "swap", "drop", "join", "layouts")))
    if act.startswith("record"):
        for number in chosen[:3] if act == "records" else [first]:
            bare = lines[number].strip(b" ,\r")
            changed = _change_value(draw, bare.decode(), JSON_TEXTS)
            lines[number] = lines[number].replace(bare, changed.encode("utf-8", "surrogatepass"))
    elif act == "repeat":
        lines[first:first] = lines[first : first + 1] * draw(st.sampled_from((1, 2, 1000)))
    elif act == "swap":
        lines[first], lines[second] = lines[second], lines[first]
    elif act == "drop":
        del lines[first]
    elif act == "layouts":
        body = lines[first].strip(b" ,\r")[1:]
        count = draw(st.sampled_from((300, 5000)))
        lines[first:first] = [b'{"extra_%d": %d, %s,' % (number, number, body) for number in range(count)]
    return (b" " if act == "join" else b"\n").join(lines)


def _safetensors(draw: st.DrawFn, content: bytes) -> bytes:
    size = int.from_bytes(content[:8], "little")
    header, tensors = content[8 : 8 + size], content[8 + size :]
    wrong = draw(st.sampled_from((None, None, None, 0, 1, size - 1, size + 1, len(content), 2**31, 2**63, 2**64 - 1)))
    if wrong is None:
        header = _json(draw, header)
    return (len(header) if wrong is None else wrong).to_bytes(8, "little") + header + tensors


def _index(draw: st.DrawFn, content: bytes) -> bytes:
    """A Megatron index: 9 bytes, then version, type and two counts, then three arrays."""
    fields = [(9, "<Q"), (17, "<B"), (18, "<Q"), (26, "<Q")]
    count = struct.unpack_from("<Q", content, 18)[0]
    arrays = [(34 + 4 * item, "<i") for item in range(count)]
    arrays += [(offset, "<q") for offset in range(34 + 4 * count, len(content) - 7, 8)]
    changed = bytearray(content)
    for _ in range(draw(st.integers(1, 3))):
        offset, form = draw(st.sampled_from(fields) | st.sampled_from(arrays))
        old = struct.unpack_from(form, changed, offset)[0]
        new = draw(st.sampled_from((old + 1, old - 1, -old, *_INTEGERS))) % (1 << 8 * struct.calcsize(form))
        changed[offset : offset + struct.calcsize(form)] = new.to_bytes(struct.calcsize(form), "little")
    return bytes(changed)


def _template(draw: st.DrawFn, content: bytes) -> bytes:
    """A chat template: pieces of Jinja in it, or instead of one of its own."""
    text, piece = content.decode(), draw(st.sampled_from(_TEMPLATES))
    place = draw(st.sampled_from([at for at in range(len(text)) if text.startswith(("{{", "{%"), at)] + [len(text)]))
    closes = [found for found in (text.find("}}", place), text.find("%}", place)) if found >= 0]
    end = min(closes) + 2 if closes and draw(st.booleans()) else place
    return (text[:place] + piece + text[end:]).encode()


def _template_config(draw: st.DrawFn, content: bytes) -> bytes:
    """The chat template in a `tokenizer_config.json`."""
    config = json.loads(content)
    template = _template(draw, config.get("chat_template", "{{ messages }}").encode()).decode()
    other = draw(st.none() | JSON_TEXTS)
    shown = json.dumps({**config, "chat_template": _MARK}, ensure_ascii=False)
    return shown.replace(f'"{_MARK}"', other or json.dumps(template)).encode("utf-8", "surrogatepass")


_BY_KIND: dict[str, Callable[[st.DrawFn, bytes], bytes]] = {
    "json": _json,
    "yaml": _yaml,
    "records": _records,
    "safetensors": _safetensors,
    "index": _index,
    "template": _template,
    "template in json": _template_config,
}


def change_file(draw: st.DrawFn, path: Path, kind: str) -> str:
    """Change a file in place, by its kind or as bytes; which of them."""
    content = path.read_bytes()
    kind = draw(st.sampled_from((kind, kind, "bytes")))
    path.write_bytes(draw(_BYTES)(content) if kind == "bytes" else _BY_KIND[kind](draw, content))
    return kind


def make_enormous(path: Path, run: bytes | None) -> None:
    """Make a file sparse, or put a run of bytes without an end in its middle."""
    if run is None:
        os.truncate(path, SPARSE_BYTES)
        return
    content = path.read_bytes()
    with path.open("wb") as file:
        file.write(content[: len(content) // 2])
        for _ in range(ENDLESS_BYTES >> 20):
            file.write(run * ((1 << 20) // len(run)))
        file.write(content[len(content) // 2 :])


def seal(checkpoint: Path, changed: str = "manifest.json") -> None:
    """Make the manifest of a checkpoint fit a changed file, and its own seal fit the manifest.

    Only so does what was changed reach the code behind the check of the hashes.
    """
    path = checkpoint / "manifest.json"
    if changed != "manifest.json":
        # a manifest that was changed before may not be JSON any more
        with suppress(ValueError, RecursionError, KeyError, TypeError, AttributeError):
            manifest = json.loads(path.read_bytes())
            content = (checkpoint / changed).read_bytes()
            manifest["files"][changed].update(size=len(content), blake3=blake3(content).hexdigest())
            path.write_text(json.dumps(manifest, indent=2) + "\n")
    content = path.read_bytes()
    start = content.rfind(b',\n  "blake3": "')
    body = content[:start] if start > 0 else content.rstrip().removesuffix(b"}").rstrip()
    path.write_bytes(body + b',\n  "blake3": "' + blake3(body).hexdigest().encode() + b'"\n}\n')
