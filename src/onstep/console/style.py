"""Says where output goes, how wide it may be, and colours it where there is a terminal."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from importlib.util import find_spec
from typing import Literal

Style = Literal["heading", "evaluation", "note", "warning", "error"]

_CODES: dict[Style, str] = {"heading": "1", "evaluation": "36", "note": "2", "warning": "33", "error": "31"}
"""Attributes of the terminal: bold, cyan, dim, yellow, red."""

Place = Literal["notebook", "terminal", "file"]


def place_of_output() -> Place:
    """Where standard output goes: to a notebook, to a terminal, or to a file or pipe."""
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", None)  # absent while a thread imports IPython
    shell = None if get_shell is None else get_shell()
    if shell is not None and "IPKernelApp" in shell.config:
        return "notebook"
    return "terminal" if getattr(sys.stdout, "isatty", lambda: False)() else "file"


def shows_bars() -> bool:
    """Whether a bar can be drawn: on a terminal, and in a notebook that has widgets; text would break its output."""
    place = place_of_output()
    return place == "terminal" or (place == "notebook" and has_widgets())


def has_widgets() -> bool:
    """Whether ipywidgets is installed, with which a notebook shows bars."""
    try:
        return find_spec("ipywidgets") is not None
    except ValueError:  # an import of it was blocked
        return False


def has_colour(stream: object) -> bool:
    """Whether a stream is a terminal with colours. `NO_COLOR` (any text) disables them: https://no-color.org."""
    is_terminal = bool(getattr(stream, "isatty", lambda: False)())
    return is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def styled(text: str, style: Style, stream: object) -> str:
    """The text in the colour of its style, if the stream has colours."""
    return f"\033[{_CODES[style]}m{text}\033[0m" if has_colour(stream) else text


def in_words(text: str, stream: object) -> str:
    """The text with lines broken at spaces, indented, where a terminal would break them in the middle of a word."""
    if not getattr(stream, "isatty", lambda: False)():
        return text
    return "\n".join(_broken(line) for line in text.split("\n"))


def _broken(line: str) -> str:
    indent = line[: len(line) - len(line.lstrip())] + "  "
    return textwrap.fill(line, width(), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def width() -> int:
    """Columns of a line: those of the terminal, else 80; `COLUMNS` overrides both."""
    return shutil.get_terminal_size().columns


def height() -> int:
    """Lines of the terminal, else 24."""
    return shutil.get_terminal_size().lines
