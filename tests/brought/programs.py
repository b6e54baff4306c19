"""What a comparison runs: a script or module with its arguments, and the commands that start it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

DOORS = ("transformers", "onstep")
"""What trains: the script as it is, or the same under `onstep run`."""


@dataclass(frozen=True)
class Program:
    """An unmodified script or module with its arguments.

    Args:
        name: how tables and the command line call it.
        target: `("-m", "package.module")` or `("path/of/script.py",)`.
        arguments: those of the script, without its output directory. `{here}` is the directory of the materials.
        output: the argument that names the output directory.
        ranks: more than one are started by `torchrun`.
    """

    name: str
    target: Sequence[str]
    arguments: Sequence[str]
    output: str = "--output_dir"
    ranks: int = 1
    needs: Sequence[str] = field(default=())
    """Packages that have to be installed."""
    tolerance: float = 1e-6
    """How far records and weights may be from those under `transformers`."""
    only_there: Sequence[str] = field(default=())
    """Arguments under `transformers` only, where it has a documented error that they switch off."""

    def command(self, door: str, here: Path, output: Path) -> list[str]:
        """The words that start it under one of `DOORS`."""
        words = [sys.executable]
        if self.ranks > 1:
            words += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}"]
        if door == "onstep":
            words += ["-m", "onstep.run"]
        given = [argument.replace("{here}", os.fspath(here)) for argument in self.arguments]
        if door == "transformers":
            given += self.only_there
        return [*words, *self.target, *given, self.output, os.fspath(output)]
