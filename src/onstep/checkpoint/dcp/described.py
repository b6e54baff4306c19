"""Describes what a pickle would make, as plain data: nothing that it names is looked up, let alone called."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from onstep.errors import CheckpointError

MAX_STACK = 10**6
"""Number of values that may wait for the operation that joins them."""


class Named(NamedTuple):
    """A class or function that the pickle names."""

    module: str
    name: str


@dataclass(eq=False)
class Made:
    """What a pickle would make by calling something."""

    by: Any
    """What would be called: `Named`, in any pickle that Python writes."""
    arguments: Any
    state: Any = None
    """What it would be given afterwards."""

    @property
    def kind(self) -> str:
        """The name of what would be called."""
        return self.by.name if isinstance(self.by, Named) else ""

    def fields(self) -> dict[str, Any]:
        """The state of a dataclass; empty for anything else."""
        pairs = self.state if isinstance(self.state, Pairs) else []
        return {name: value for name, value in pairs if isinstance(name, str)}


class Pairs(list[tuple[Any, Any]]):
    """A dictionary, whose keys need not be hashable here."""


@dataclass(frozen=True)
class Elsewhere:
    """A reference to something that is stored beside the pickle."""

    reference: Any


class MalformedPickleError(CheckpointError):
    """The bytes are not a pickle, or one with operations that plain data does not need."""


_MARK = object()


def describe(content: bytes) -> Any:
    """What the pickle in `content` would make: numbers, text, lists, tuples, `Pairs`, `Made`, `Named`, `Elsewhere`.

    Raises:
        MalformedPickleError: if it is incomplete, or has an operation that is not known here.
    """
    try:
        return _Reader(content).read()
    except (struct.error, IndexError, KeyError, UnicodeDecodeError, ValueError, TypeError, OverflowError) as error:
        raise MalformedPickleError(f"it is not a complete pickle ({type(error).__name__}: {error})") from error


class _Reader:
    def __init__(self, content: bytes) -> None:
        self._content, self._position = content, 0
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def read(self) -> Any:
        while True:
            code = self._take(1)
            if code == b".":
                return self._stack.pop()
            operation = _OPERATIONS.get(code)
            if operation is None:
                raise MalformedPickleError(f"it has the operation {code!r} at byte {self._position - 1}")
            operation(self)
            if len(self._stack) > MAX_STACK:
                raise MalformedPickleError(f"it has more than {MAX_STACK} values at a time")

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def number(self, form: str) -> Any:
        """The next number, in a form of `struct`."""
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def text(self, form: str) -> None:
        self.push(self._take(self.number(form)).decode("utf-8", "surrogatepass"))

    def data(self, form: str) -> None:
        self.push(self._take(self.number(form)))

    def long(self, form: str) -> None:
        self.push(int.from_bytes(self._take(self.number(form)), "little", signed=True))

    def remember(self, place: int) -> None:
        self._memo[place] = self._stack[-1]

    def memoize(self) -> None:
        self.remember(len(self._memo))

    def recall(self, form: str) -> None:
        self.push(self._memo[self.number(form)])

    def name(self) -> None:
        self.push(Named(self._line(), self._line()))

    def stack_name(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        self.push(Named(str(module), str(name)))

    def items(self) -> list[Any]:
        """The values since the last mark."""
        place = max(index for index, value in enumerate(self._stack) if value is _MARK)
        found = self._stack[place + 1 :]
        del self._stack[place:]
        return found

    def tuple_of(self, number: int) -> None:
        items = tuple(self._stack[-number:])
        if len(items) != number:
            raise IndexError("a tuple has fewer items than it says")
        del self._stack[-number:]
        self.push(items)

    def make(self) -> None:
        arguments, by = self._stack.pop(), self._stack.pop()
        self.push(Made(by, arguments))

    def build(self) -> None:
        state = self._stack.pop()
        if isinstance(self._stack[-1], Made):
            self._stack[-1].state = state

    def extend(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if isinstance(target, list):
            target.extend(items)

    def set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if isinstance(target, Pairs):
            target.extend(zip(items[::2], items[1::2], strict=True))

    def pop(self, number: int) -> list[Any]:
        items = self._stack[-number:]
        del self._stack[-number:]
        return items

    def _take(self, size: int) -> bytes:
        end = self._position + size
        if size < 0 or end > len(self._content):
            raise MalformedPickleError("it ends too early")
        taken = self._content[self._position : end]
        self._position = end
        return taken

    def _line(self) -> str:
        end = self._content.index(b"\n", self._position)
        return self._take(end - self._position + 1)[:-1].decode()


_OPERATIONS: dict[bytes, Callable[[_Reader], Any]] = {
    b"\x80": lambda reader: reader.number("<B"),
    b"\x95": lambda reader: reader.number("<Q"),
    b"(": lambda reader: reader.push(_MARK),
    b"0": lambda reader: reader.pop(1),
    b"1": lambda reader: reader.items(),
    b"N": lambda reader: reader.push(None),
    b"\x88": lambda reader: reader.push(True),
    b"\x89": lambda reader: reader.push(False),
    b"K": lambda reader: reader.push(reader.number("<B")),
    b"M": lambda reader: reader.push(reader.number("<H")),
    b"J": lambda reader: reader.push(reader.number("<i")),
    b"G": lambda reader: reader.push(reader.number(">d")),
    b"\x8a": lambda reader: reader.long("<B"),
    b"\x8b": lambda reader: reader.long("<i"),
    b"\x8c": lambda reader: reader.text("<B"),
    b"X": lambda reader: reader.text("<I"),
    b"\x8d": lambda reader: reader.text("<Q"),
    b"C": lambda reader: reader.data("<B"),
    b"B": lambda reader: reader.data("<I"),
    b"\x8e": lambda reader: reader.data("<Q"),
    b"q": lambda reader: reader.remember(reader.number("<B")),
    b"r": lambda reader: reader.remember(reader.number("<I")),
    b"\x94": lambda reader: reader.memoize(),
    b"h": lambda reader: reader.recall("<B"),
    b"j": lambda reader: reader.recall("<I"),
    b"c": lambda reader: reader.name(),
    b"\x93": lambda reader: reader.stack_name(),
    b")": lambda reader: reader.push(()),
    b"\x85": lambda reader: reader.tuple_of(1),
    b"\x86": lambda reader: reader.tuple_of(2),
    b"\x87": lambda reader: reader.tuple_of(3),
    b"t": lambda reader: reader.push(tuple(reader.items())),
    b"]": lambda reader: reader.push([]),
    b"l": lambda reader: reader.push(reader.items()),
    b"\x8f": lambda reader: reader.push([]),
    b"\x91": lambda reader: reader.push(tuple(reader.items())),
    b"a": lambda reader: reader.extend(reader.pop(1)),
    b"e": lambda reader: reader.extend(reader.items()),
    b"\x90": lambda reader: reader.extend(reader.items()),
    b"}": lambda reader: reader.push(Pairs()),
    b"s": lambda reader: reader.set_items(reader.pop(2)),
    b"u": lambda reader: reader.set_items(reader.items()),
    b"R": lambda reader: reader.make(),
    b"\x81": lambda reader: reader.make(),
    b"b": lambda reader: reader.build(),
    b"Q": lambda reader: reader.push(Elsewhere(reader.pop(1)[0])),
}
"""By the operations' codes; those of protocols 2 to 5 that values, containers, classes and their instances need."""
