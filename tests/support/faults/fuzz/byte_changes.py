"""Changes of a file as bytes, which know nothing of its format."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

Change = tuple[str, bytes]
"""What was done, in a few words, and the new content."""

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
_LENGTHS = (1, 2, 7, 64, 1000, 20_000, 1_000_000)
_SHARES = (6, 4, 4, 3, 3, 2, 1)


def change_bytes(content: bytes, random: Random) -> Change:
    """One change of the bytes."""
    return random.choice(_CHANGES)(content, random)


def _flip(content: bytes, random: Random) -> Change:
    count = random.choice((1, 1, 1, 4, 40))
    changed = bytearray(content)
    places = [random.randrange(len(content)) for _ in range(count)] if content else []
    for place in places:
        changed[place] ^= 1 << random.randrange(8)
    return f"{count} bits flipped, the first at byte {places[0] if places else None}", bytes(changed)


def _truncate(content: bytes, random: Random) -> Change:
    end = random.choice((0, 1, len(content) // 2, max(len(content) - 1, 0), random.randint(0, len(content))))
    return f"cut off at byte {end} of {len(content)}", content[:end]


def _zero_tail(content: bytes, random: Random) -> Change:
    start = random.randint(0, len(content))
    return f"zeros from byte {start} of {len(content)}", content[:start] + bytes(len(content) - start)


def _extend(content: bytes, random: Random) -> Change:
    count = _length(random)
    return f"{count} zeros appended", content + bytes(count)


def _cut_out(content: bytes, random: Random) -> Change:
    start, end = _span(content, random)
    return f"bytes {start} to {end} removed", content[:start] + content[end:]


def _repeat(content: bytes, random: Random) -> Change:
    start, end = _span(content, random)
    times = random.choice((2, 2, 5, 100))
    return f"bytes {start} to {end} repeated {times} times", content[:start] + content[start:end] * times + content[
        end:
    ]


def _swap(content: bytes, random: Random) -> Change:
    one, two, three, four = sorted(random.randint(0, len(content)) for _ in range(4))
    changed = content[:one] + content[three:four] + content[two:three] + content[one:two] + content[four:]
    return f"bytes {one} to {two} and {three} to {four} swapped", changed


def _insert(content: bytes, random: Random) -> Change:
    place, what, count = random.randint(0, len(content)), random.choice(_RUNS), _length(random)
    return f"{count} times {what!r} inserted at byte {place}", content[:place] + what * count + content[place:]


def _overwrite(content: bytes, random: Random) -> Change:
    start, end = _span(content, random)
    return f"bytes {start} to {end} random", content[:start] + random.randbytes(end - start) + content[end:]


def _length(random: Random) -> int:
    return random.choices(_LENGTHS, _SHARES)[0]


def _span(content: bytes, random: Random) -> tuple[int, int]:
    start = random.randint(0, len(content))
    return start, min(len(content), start + random.choice((1, 4, 16, 64, max(1, len(content) // 3))))


_CHANGES: tuple[Callable[[bytes, Random], Change], ...] = (
    _flip, _flip, _truncate, _zero_tail, _extend, _cut_out, _repeat, _swap, _insert, _insert, _overwrite,
)  # fmt: skip
