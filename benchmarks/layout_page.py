"""The page of layouts: which feature works on which layout, and how far it is from one process.

`python benchmarks/layouts.py --page docs/guide/layouts.md` measures it, and writes its table and footnotes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

ROWS = {
    "ddp2": "ddp2",
    "fsdp2": "fsdp2",
    "hsdp 2x2": "hsdp 2x2",
    "distopt2": "distopt2",
    "tp2": "tp2",
    "tp2 sp": "tp2 sp",
    "tp4 sp": "tp4 sp",
    "dp2 x tp2": "dp2 x tp2",
    "fsdp2 x tp2 sp": "fsdp2 x tp2 sp",
    "hsdp 2x2 x tp2 sp": "hsdp 2x2 x tp2 sp",
    "distopt2 x tp2": "distopt2 x tp2",
    "pp2 1F1B": "pp2",
    "pp2 GPipe": "pp2 GPipe",
    "pp2 Interleaved1F1B": "pp2 interleaved",
    "pp2 LoopedBFS": "pp2 LoopedBFS",
    "pp2 InterleavedZeroBubble": "pp2 zero bubble",
    "pp2 ZBVZeroBubble": "pp2 ZBV",
    "pp2 DualPipeV": "pp2 DualPipeV",
    "pp4 1F1B": "pp4",
    "dp2 x pp2 1F1B": "dp2 x pp2",
    "tp2 x pp2 1F1B": "tp2 x pp2",
    "fsdp2 x pp2 Interleaved1F1B": "fsdp2 x pp2",
    "distopt2 x pp2 1F1B": "distopt2 x pp2",
}
"""The layouts of the table, by what it calls them."""
LOSS, EVALUATION, TOKENS = "loss and norm", "evaluation", "tokens"
COLUMNS = {
    "4 micro-batches": ("ragged", LOSS),
    "1 micro-batch": ("once", LOSS),
    "clipping": ("ragged", LOSS),
    "ragged labels": ("ragged", LOSS),
    "vocabulary of 67": ("ragged", LOSS),
    "two groups": ("ragged", LOSS),
    "loss-parallel": ("recipe", LOSS),
    "dropout": ("both dropouts", LOSS),
    "a recipe": ("recipe", LOSS),
    "tied": ("recipe", LOSS),
    "documents": ("recipe", LOSS),
    "evaluation": ("recipe", EVALUATION),
    "generation": ("recipe", TOKENS),
    "`hf_config`": ("family", LOSS),
    "... evaluation": ("family", EVALUATION),
    "... generation": ("family", TOKENS),
    "`train()`": ("given model", LOSS),
    "`Trainer`": ("a Trainer", LOSS),
    "... its evaluation": ("a Trainer", EVALUATION),
}
"""The features of the table, each with the variant that has it, and what of it is compared with one process."""
SAME = "same"
_PART = re.compile(r"(?<=<!-- measured: layouts -->\n).*?(?=<!-- end of measured part -->)", re.DOTALL)


@dataclass
class Found:
    """What a variant came to on a layout, beside one process."""

    figures: dict[str, str] = field(default_factory=dict)
    """By kind: the largest relative difference, or whether the tokens are the same."""
    refusal: str | None = None
    """Why it does not run."""


def write(page: Path, found: dict[tuple[str, str], Found]) -> None:
    """Write the table and its footnotes in the place of those of the page.

    Args:
        page: the file.
        found: by layout and variant.
    """
    notes: list[str] = []
    lines = [_line(["layout", *COLUMNS]), "|---" * (len(COLUMNS) + 1) + "|"]
    for label, layout in ROWS.items():
        cells = [_cell(found[layout, variant], kind, notes) for variant, kind in COLUMNS.values()]
        lines.append(_line([label, *cells]))
    refused = "\n".join(f"{number}. {note}" for number, note in enumerate(notes, start=1))
    text = page.read_text()
    page.write_text(
        _PART.sub(lambda _: "\n" + "\n".join(lines) + f"\n\nRefused, with these words:\n\n{refused}\n\n", text)
    )


def _cell(found: Found, kind: str, notes: list[str]) -> str:
    if found.refusal is None:
        return found.figures[kind]
    if found.refusal not in notes:
        notes.append(found.refusal)
    return f"({notes.index(found.refusal) + 1})"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def read(page: Path) -> dict[tuple[str, str], Found]:
    """What a page says, by layout and variant.

    Args:
        page: the file.
    """
    [part] = _PART.findall(page.read_text())
    notes = dict(re.findall(r"^(\d+)\. (.+)$", part, re.MULTILINE))
    found: dict[tuple[str, str], Found] = {}
    _, _, *rows = [line for line in part.splitlines() if line.startswith("|")]
    for row in rows:
        label, *cells = [cell.strip() for cell in row.strip("|").split("|")]
        for (variant, kind), cell in zip(COLUMNS.values(), cells, strict=True):
            of_cell = found.setdefault((ROWS[label], variant), Found())
            if cell.startswith("("):
                of_cell.refusal = notes[cell.strip("()")]
            else:
                of_cell.figures[kind] = cell
    return found
