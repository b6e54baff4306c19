"""`onstep` in a forked process: `job_onstep(settings)`."""

from __future__ import annotations

import os
import sys
from typing import Any


def job_onstep(settings: dict[str, Any]) -> None:
    """Do what `onstep <words>` does; standard output and error go to the files that the settings name."""
    from onstep.cli.main import main

    for descriptor, path in ((1, settings["stdout"]), (2, settings["stderr"])):
        if path is not None:
            opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(opened, descriptor)
            os.close(opened)
    if settings["stdout"] is None:
        os.close(1)
        sys.stdout = sys.__stdout__ = None  # type: ignore[misc,assignment]
    os.environ.update(settings["environment"])
    sys.argv = ["onstep", *settings["words"]]
    raise SystemExit(main(settings["words"]))
