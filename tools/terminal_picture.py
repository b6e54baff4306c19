"""Draws what a command shows in a terminal of 100 columns, colors included, as an SVG file.

    python tools/terminal_picture.py docs/assets/demo_terminal.svg onstep demo

Requires tmux, which is the terminal, and rich, which the command line's library installs.
"""

from __future__ import annotations

import io
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

COLUMNS, LINES = 100, 200
_SESSION = "onstep-picture"
_FONTS = re.compile(r"@font-face \{.*?\}", re.DOTALL)


def _tmux(*words: str) -> str:
    return subprocess.run(["tmux", "-L", _SESSION, *words], check=True, text=True, capture_output=True).stdout


def shown_by(command: str) -> str:
    """What a terminal shows once the command has ended, with escape sequences for colors."""
    size = ["-x", str(COLUMNS), "-y", str(LINES)]
    _tmux("new-session", "-d", *size, f"{command}; tmux -L {_SESSION} wait-for -S ended; sleep 60")
    try:
        _tmux("wait-for", "ended")
        time.sleep(0.5)  # for the terminal to draw the last line
        return _tmux("capture-pane", "-p", "-e").rstrip()
    finally:
        _tmux("kill-server")


def draw(path: Path, command: str, text: str) -> None:
    """Write an SVG picture of a terminal window with this text."""
    from rich.console import Console
    from rich.text import Text

    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text(f"$ {command}", style="bold"))
    console.print(Text.from_ansi(text))
    picture = console.export_svg(title="onstep")
    path.write_text(_FONTS.sub("", picture))  # the reader's own: a page of the docs fetches nothing


def main() -> None:
    """Draw the command line's own arguments."""
    path, command = Path(sys.argv[1]), shlex.join(sys.argv[2:])
    draw(path, command, shown_by(command))
    print(path)


if __name__ == "__main__":
    main()
