"""The fenced blocks of the documentation's pages: what a reader can copy."""

from __future__ import annotations

import re
import shlex
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onstep.cli.main import main

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w+)[^\n]*\n(?P<code>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL
)
GENERATED = re.compile(r"^<!-- generated: .*?^<!-- end of generated part -->$", re.MULTILINE | re.DOTALL)
"""What `docs/generate.py` wrote, such as the loop: shown, not an example."""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    """Where its code begins, from 1."""
    code: str
    language: str = "python"

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def run(self, namespace: dict[str, Any]) -> None:
        """Execute the code as if it stood in the page, so that a traceback has the page's lines."""
        exec(compile("\n" * (self.line - 1) + self.code, str(self.page), "exec"), namespace)

    def lines(self) -> list[str]:
        """The lines of the code; one that ends in a backslash has the next one with it."""
        return self.code.replace("\\\n", " ").splitlines()

    def run_commands(self) -> None:
        """Run the `onstep` command lines in this process."""
        for line in self.lines():
            command = shlex.split(line, comments=True)
            if command[:1] == ["onstep"]:
                assert main(command[1:]) == 0, f"{self}: {line}"


def blocks(page: Path, *languages: str) -> list[Block]:
    """The blocks of some languages in a page, in order."""
    text = GENERATED.sub(lambda part: "\n" * part[0].count("\n"), page.read_text(encoding="utf-8"))
    found = [match for match in FENCE.finditer(text) if match["language"] in languages]
    return [
        Block(page, text.count("\n", 0, match.start("code")) + 1, textwrap.dedent(match["code"]), match["language"])
        for match in found
    ]
