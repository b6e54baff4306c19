"""A program of a test in a forked process: `job_script(settings)`."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any


def job_script(settings: dict[str, Any]) -> None:
    """Run the file `script` as the main program, with `arguments` and variables of the `environment`."""
    if "arguments" in settings:
        sys.argv = [settings["script"], *settings["arguments"]]
        sys.path.insert(0, str(Path(settings["script"]).parent))
    os.environ.update(settings.get("environment", {}))
    runpy.run_path(settings["script"], run_name="__main__")
