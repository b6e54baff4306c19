"""What a terminal shows after some output: enough of one for bars, which move the cursor up and to the left."""

from __future__ import annotations

import io
import re


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True

    def shown(self) -> list[str]:
        """The lines on its screen, without colours."""
        lines, row, column = [""], 0, 0
        for token in re.findall(r"\x1b\[A|\x1b\[\d*m|[^\x1b]", self.getvalue()):
            if token == "\x1b[A":
                row -= 1
            elif token == "\n":
                row, column = row + 1, 0
                lines += [""] * (row + 1 - len(lines))
            elif token == "\r":
                column = 0
            elif not token.startswith("\x1b"):
                line = lines[row].ljust(column)
                lines[row], column = line[:column] + token + line[column + 1 :], column + 1
        return [line.rstrip() for line in lines]
