"""Finds the mapping in which a key was looked up in vain, from the traceback of a KeyError."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Mapping
from itertools import islice
from types import TracebackType
from typing import Any


def is_of_batch(error: KeyError, batch: Mapping[Any, Any]) -> bool:
    """Whether `error` comes from looking up a missing key in a micro-batch, a copy or a part of it.

    The user's error may as well come from a table of the user's own.
    """
    key = error.args[0] if error.args else None
    if not isinstance(key, str) or key in batch:
        return False
    searched = _searched(error.__traceback__)
    if searched is batch:
        return True
    return isinstance(searched, Mapping) and len(searched) > 0 and all(one in batch for one in searched)


def _searched(traceback: TracebackType | None) -> Any:
    """The mapping whose own `__getitem__` failed, or what is before `[key]` or `.pop(key)` in the innermost line.

    None if that is neither a variable nor an attribute.
    """
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is None:
        return None
    frame = traceback.tb_frame
    names = {**frame.f_globals, **frame.f_locals}
    if frame.f_code.co_name == "__getitem__" and isinstance(names.get("self"), Mapping):
        return names["self"]
    positions = next(islice(frame.f_code.co_positions(), traceback.tb_lasti // 2, None), (None,) * 4)
    line, end_line, start, end = positions
    if line is None or end_line is None or start is None or end is None:
        return None
    lines = [
        linecache.getline(frame.f_code.co_filename, n, frame.f_globals).encode() for n in range(line, end_line + 1)
    ]
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][start:]
    try:
        node: ast.AST = ast.parse(b"(" + b"".join(lines) + b")", mode="eval").body
    except (SyntaxError, ValueError):
        return None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        node = node.func
    return _value_of(node.value, names) if isinstance(node, (ast.Subscript, ast.Attribute)) else None


def _value_of(node: ast.expr, names: dict[str, Any]) -> Any:
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        return getattr(_value_of(node.value, names), "__dict__", {}).get(node.attr)
    return None
