"""What the ranks of the tests of layouts run: `job_*(settings)`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from layout_rows import LAYOUTS, VARIANTS, run_row


def job_rows(settings: dict[str, Any]) -> list[Any]:
    """Variants of one layout, one after the other; their weights are in `<number>.pt`."""
    return [
        run_row(
            LAYOUTS[settings["layout"]], replace(VARIANTS[name], **more), settings["steps"], parameters=f"{number}.pt"
        )
        for number, (name, more) in enumerate(settings["variants"])
    ]
