"""Reads files that others may have written, with bounds on their size, their nesting and the length of their integers.

Every bound is part of the error message. Nothing that is read here is executed.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Iterator
from functools import cache
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, NoReturn

from onstep.errors import ConfigError, DataError, OnstepError

MAX_JSON_BYTES = 64 << 20
"""Default limit for a JSON file; about ten times the size of the largest that is in use."""
MAX_NESTING = 100
"""Maximum depth of lists and objects in JSON."""
MAX_DIGITS = 300
"""Enough for every float; the time to parse an integer grows with the square of its length."""
MAX_VALUES = 10_000_000
"""Maximum number of values, lists and objects in JSON; each needs up to 72 bytes of memory."""
DIGITS_OF_64_BITS = 20


def open_file(path: str | Path) -> BufferedReader:
    """Open a file to read bytes; a named pipe, on whose writer one would wait for ever, is refused.

    Raises:
        OSError: if the file cannot be read.
    """
    if stat.S_ISFIFO(os.stat(path).st_mode):
        raise OSError(errno.ESPIPE, "it is a pipe instead of a file", str(path))
    return open(path, "rb")


def open_regular_file(path: str | Path) -> BufferedReader:
    """Open a file to read bytes that is nothing else: a link may point anywhere, and a pipe would block.

    Raises:
        OSError: with the reason, if it cannot be opened, or is a link, a pipe, a device or a directory.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if Path(path).is_symlink():
            raise OSError(error.errno, "it is a symbolic link", str(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return open(descriptor, "rb")


def read_bytes(
    path: str | Path, limit: int, *, error: type[OnstepError] = DataError, allows_pipe: bool = False
) -> bytes:
    """The content of a file of at most `limit` bytes. A larger one is refused before it is read.

    Args:
        error: class of the exception for a file that is too large.
        allows_pipe: whether to wait for what another process writes to a pipe.

    Raises:
        OSError: if the file cannot be read.
    """
    with open(path, "rb") if allows_pipe else open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(size + 1) if size <= limit else b""  # memory is taken for all that is asked for
        if len(content) > size:  # of a pipe, or of a file that grows
            content += file.read(limit + 1 - len(content))
    if size > limit or len(content) > limit:
        raise error(
            f"{path} has {max(size, len(content)):,} bytes, and at most {limit:,} are read; it is damaged or not the "
            "file that is meant. Restore it or give another one."
        )
    return content


def read_lines(file: IO[bytes], limit: int) -> Iterator[tuple[int, bytes]]:
    """The lines of a file that is open for reading bytes, numbered from 1, each of at most `limit` bytes.

    Raises:
        OSError: if the file cannot be read.
        DataError: for a longer line, of which no more is read.
    """
    number = 0
    while line := file.readline(limit + 1):
        number += 1
        if len(line) > limit:
            raise DataError(
                f"{file.name}:{number} is a line of more than {limit:,} bytes, the limit; divide it, or give another "
                "file if this is not the one that is meant."
            )
        yield number, line


def read_json(path: str | Path, *, limit: int = MAX_JSON_BYTES, error: type[OnstepError] = DataError) -> Any:
    """The value in a JSON file, within the bounds of `read_bytes` and `parse_json`.

    Raises:
        OSError: if the file cannot be read.
        OnstepError: of class `error`, with the reason, for anything that is not JSON within the bounds.
    """
    return parse_json(read_bytes(path, limit, error=error), str(path), error=error)


def parse_json(
    text: bytes | str,
    where: str,
    *,
    error: type[OnstepError] = DataError,
    max_digits: int = MAX_DIGITS,
    max_nesting: int = MAX_NESTING,
    allows_constants: bool = True,
    allows_repetition: bool = False,
) -> Any:
    """Parse UTF-8 JSON without repeated names in an object, very deep nesting, very long integers or too many values.

    Args:
        where: names the source in the error message.
        error: class of the exception.
        max_digits: maximum number of characters of an integer.
        max_nesting: maximum depth of lists and objects.
        allows_constants: whether NaN and infinities, as written by Python, are accepted.
        allows_repetition: whether a name may occur twice in an object; the last value counts.

    Raises:
        OnstepError: of class `error`, with the reason, for anything else.
    """
    if len(text) > MAX_VALUES and number_of_values(text) > MAX_VALUES:
        raise error(f"{where} has {number_of_values(text):,} values, and at most {MAX_VALUES:,} are read; restore it.")
    decoder = _decoder(max_digits, allows_constants, allows_repetition)
    try:
        value = decoder.decode(text if isinstance(text, str) else text.decode("utf-8"))
        if _num_containers(text) > max_nesting:
            check_nesting(value, max_nesting)
    except (ValueError, RecursionError) as problem:
        deep = isinstance(problem, RecursionError)
        reason = f"it is nested more than {max_nesting} levels deep" if deep else problem
        raise error(f"{where} is not valid JSON: {reason}.") from problem
    return value


@cache
def _decoder(max_digits: int, allows_constants: bool, allows_repetition: bool) -> json.JSONDecoder:
    def integer(digits: str) -> int:
        if len(digits) > max_digits:
            raise ValueError(f"an integer of {len(digits)} digits; at most {max_digits} are allowed")
        return int(digits)

    return json.JSONDecoder(
        object_pairs_hook=None if allows_repetition else _without_repetition,
        parse_int=integer,
        parse_constant=None if allows_constants else _no_constant,
    )


def integer_from_environment(name: str, fallback: int) -> int:
    """The value of an environment variable that launchers set (`RANK`); `fallback` if it is unset or empty.

    Raises:
        ConfigError: for anything but an integer of 32 bits.
    """
    text = os.environ.get(name, "")
    value = int(text) if re.fullmatch(r"\s*[-+]?[0-9]{1,10}\s*", text, re.ASCII) else 2**31
    if text and not -(2**31) <= value < 2**31:
        raise ConfigError(f"${name} must be an integer of 32 bits, as set by torchrun, got {text[:100]!r}; unset it.")
    return value if text else fallback


def number_of_values(text: bytes | str) -> int:
    """An upper bound of the values, lists and objects in JSON; 0 if there can be at most `MAX_VALUES`."""
    if len(text) <= MAX_VALUES:
        return 0
    if isinstance(text, str):
        return sum(text.count(mark) for mark in "[{,")
    return sum(text.count(mark) for mark in (b"[", b"{", b","))


def _num_containers(text: bytes | str) -> int:
    """An upper bound of the lists and objects in JSON, and of how deeply they are nested."""
    return text.count("[") + text.count("{") if isinstance(text, str) else text.count(b"[") + text.count(b"{")


def check_nesting(value: Any, max_nesting: int = MAX_NESTING) -> None:
    """Check how deeply the lists and objects of a decoded value are nested.

    Raises:
        RecursionError: if it is more than `max_nesting` levels.
    """
    level = _containers([value])
    for _ in range(max_nesting):
        level = [inner for outer in level for inner in _containers(outer)]
        if not level:
            return
    raise RecursionError


def _containers(outer: list[Any] | dict[str, Any]) -> list[list[Any] | dict[str, Any]]:
    return [one for one in (outer if isinstance(outer, list) else outer.values()) if isinstance(one, (list, dict))]


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name occurs twice in one object")
    return result


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def brief(value: Any, limit: int = 60) -> str:
    """A value as it appears in messages: its `repr`, at most `limit` characters."""
    try:
        text = repr(value[: limit + 1] if isinstance(value, (str, bytes)) else value)
    except (ValueError, RecursionError):  # an integer of many digits; deep nesting
        text = f"a value of type {type(value).__name__} that is too long to show"
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
