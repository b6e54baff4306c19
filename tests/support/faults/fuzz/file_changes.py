"""Changes of a file by its kind, and the seals that let a changed file pass the check of its hash."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random

from blake3 import blake3

from tests.support.faults.fuzz.byte_changes import change_bytes
from tests.support.faults.fuzz.value_changes import change_json, change_yaml, strange_json

_BLIND = 0.3
"""Share of the changes that know nothing of the format."""
_ENORMOUS = 0.004
"""Share of files that become enormous: as a sparse file, or as a line without an end."""
SPARSE_BYTES = 3 << 30
ENDLESS_BYTES = 200 << 20

_INTEGERS = (0, 1, -1, 2, 7, 255, 2**15, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1, -(2**31), -(2**63))


def change_file(path: Path, kind: str, random: Random) -> str:
    """Change a file in place; what was done. A file that an earlier change made enormous stays as it is."""
    if path.stat().st_size >= ENDLESS_BYTES:
        return "nothing more"
    if random.random() < _ENORMOUS:
        return _make_enormous(path, random)
    content = path.read_bytes()
    if kind == "bytes" or random.random() < _BLIND:
        done, changed = change_bytes(content, random)
    else:
        done, changed = _BY_KIND[kind](content, random)
    path.write_bytes(changed)
    return done


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


def _make_enormous(path: Path, random: Random) -> str:
    if random.random() < 0.5:
        os.truncate(path, SPARSE_BYTES)
        return f"sparse, of {SPARSE_BYTES:,} bytes"
    content, piece = path.read_bytes(), random.choice((b"a", b"[", b"1", b'{"a": 1}, ')) * (1 << 20)
    with path.open("wb") as file:
        file.write(content[: len(content) // 2])
        written = 0
        while written < ENDLESS_BYTES:
            written += file.write(piece)
        file.write(content[len(content) // 2 :])
    return f"a run of {written:,} bytes {piece[:10]!r} in the middle"


def _json(content: bytes, random: Random) -> tuple[str, bytes]:
    done, text = change_json(content.decode(), random, indent=2)
    return done, text.encode("utf-8", "surrogatepass")


def _yaml(content: bytes, random: Random) -> tuple[str, bytes]:
    done, text = change_yaml(content.decode(), random)
    return done, text.encode("utf-8", "surrogatepass")


def _records(content: bytes, random: Random) -> tuple[str, bytes]:
    """One JSON value per line, with or without the brackets and commas of a list."""
    lines = content.split(b"\n")
    chosen = [number for number, line in enumerate(lines) if line.strip(b" ,\r").startswith(b"{")]
    kind = random.choices(
        ("record", "duplicate", "swap", "drop", "join", "layouts", "records"), (12, 1, 1, 1, 1, 1, 1)
    )[0]
    first, second = random.choice(chosen), random.choice(chosen)
    if kind == "record":
        done, lines[first] = _record(lines[first], random)
        return f"line {first + 1}: {done}", b"\n".join(lines)
    if kind == "duplicate":
        times = random.choice((2, 3, 1000))
        return f"line {first + 1} {times} times", b"\n".join(
            [*lines[:first], *lines[first : first + 1] * times, *lines[first:]]
        )
    if kind == "swap":
        lines[first], lines[second] = lines[second], lines[first]
        return f"lines {first + 1} and {second + 1} swapped", b"\n".join(lines)
    if kind == "drop":
        del lines[first]
        return f"line {first + 1} removed", b"\n".join(lines)
    if kind == "join":
        return "all in one line", b" ".join(lines)
    if kind == "layouts":
        count = random.choice((300, 5000))
        body = lines[first].strip(b" ,\r")[1:]
        more = [b'{"extra_%d": %d, %s,' % (number, number, body) for number in range(count)]
        return f"{count} records with a name of their own each", b"\n".join([*lines[:first], *more, *lines[first:]])
    for number in chosen:
        done, lines[number] = _record(lines[number], random)
    return "every record changed", b"\n".join(lines)


def _record(line: bytes, random: Random) -> tuple[str, bytes]:
    bare = line.strip(b" ,\r")
    done, text = change_json(bare.decode(), random)
    return done, line.replace(bare, text.encode("utf-8", "surrogatepass"))


def _safetensors(content: bytes, random: Random) -> tuple[str, bytes]:
    size = int.from_bytes(content[:8], "little")
    header, tensors = content[8 : 8 + size], content[8 + size :]
    if random.random() < 0.15:
        wrong = random.choice((size + 1, size - 1, 0, 1, len(content), 2**31, 2**63, 2**64 - 1, size + len(tensors)))
        return f"header of {wrong} bytes", wrong.to_bytes(8, "little") + content[8:]
    done, text = change_json(header.decode(), random)
    changed = text.encode("utf-8", "surrogatepass")
    return f"header: {done}", len(changed).to_bytes(8, "little") + changed + tensors


def _index(content: bytes, random: Random) -> tuple[str, bytes]:
    """A Megatron index: 9 bytes, then version, type and two counts, then three arrays."""
    fields = [
        (9, "<Q", "version"),
        (17, "<B", "type"),
        (18, "<Q", "number of sequences"),
        (26, "<Q", "number of documents"),
    ]
    count = struct.unpack_from("<Q", content, 18)[0]
    fields += [(34 + 4 * item, "<i", f"length {item}") for item in range(count)]
    fields += [(34 + 4 * count + 8 * item, "<q", f"pointer {item}") for item in range(count)]
    fields += [(offset, "<q", f"document at {offset}") for offset in range(34 + 12 * count, len(content) - 7, 8)]
    changed, done = bytearray(content), []
    for _ in range(random.choice((1, 1, 2, 5))):
        offset, form, name = random.choice(fields[:4] if random.random() < 0.4 else fields)
        old = struct.unpack_from(form, changed, offset)[0]
        new = random.choice((old + 1, old - 1, -old, *_INTEGERS)) % (1 << 8 * struct.calcsize(form))
        changed[offset : offset + struct.calcsize(form)] = new.to_bytes(struct.calcsize(form), "little")
        done.append(f"{name} {new}")
    return "; ".join(done), bytes(changed)


_TEMPLATE = (
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


def _template(content: bytes, random: Random) -> tuple[str, bytes]:
    """A chat template: pieces of Jinja in it, or instead of one of its own."""
    text = content.decode()
    piece = random.choice(_TEMPLATE)
    ends = [at for at in range(len(text)) if text.startswith(("{{", "{%"), at)] + [len(text)]
    place = random.choice(ends)
    if random.random() < 0.3:
        close = min(
            (found for found in (text.find("}}", place), text.find("%}", place)) if found >= 0), default=place - 2
        )
        return f"{piece} at {place}, instead of what was there", (text[:place] + piece + text[close + 2 :]).encode()
    return f"{piece} at {place}", (text[:place] + piece + text[place:]).encode()


def _template_config(content: bytes, random: Random) -> tuple[str, bytes]:
    """The chat template in a `tokenizer_config.json`."""
    config = json.loads(content)
    if random.random() < 0.2:
        done, text = strange_json(random)
        return f"chat_template: {done}", json.dumps({**config, "chat_template": "\ue000"}).replace(
            '"\\ue000"', text
        ).encode()
    done, changed = _template(config.get("chat_template", "{{ messages }}").encode(), random)
    return done, json.dumps({**config, "chat_template": changed.decode()}).encode()


_BY_KIND: dict[str, Callable[[bytes, Random], tuple[str, bytes]]] = {
    "json": _json,
    "yaml": _yaml,
    "records": _records,
    "safetensors": _safetensors,
    "index": _index,
    "template": _template,
    "template in json": _template_config,
}
