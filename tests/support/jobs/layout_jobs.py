"""What the ranks of the tests of layouts run: `job_*(settings)`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from layout_rows import LAYOUTS, VARIANTS, run_row


def job_row(settings: dict[str, Any]) -> dict[str, Any]:
    """Variants of one layout, one after the other."""
    layout = LAYOUTS[settings["layout"]]
    return {
        name: run_row(layout, replace(VARIANTS[name], **settings.get("changes", {})), settings["steps"], parameters=f"{number}.pt")
        for number, name in enumerate(settings["variants"])
    }
