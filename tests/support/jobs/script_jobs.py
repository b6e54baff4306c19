"""A program of a test in a forked process: `job_script(settings)`."""

from __future__ import annotations

import runpy
from typing import Any


def job_script(settings: dict[str, Any]) -> None:
    """Run the file `script` as the main program."""
    runpy.run_path(settings["script"], run_name="__main__")
