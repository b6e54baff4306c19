"""Counts the results of a run of the tests by file, for the page of promises (tools/promises.py).

With ONSTEP_RESULTS=FILE in the environment, `pytest` writes there, as JSON, how many cases of each file passed, failed
or were skipped, what tests counted with `record_property`, and on which machine and revision.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

ENVIRONMENT = "ONSTEP_RESULTS"


class Results:
    """A plugin of the process that reports; workers of pytest-xdist send their reports to it."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._begin = time.time()
        self._files: dict[str, Counter[str]] = defaultdict(Counter)
        self._counts: dict[str, dict[str, Any]] = defaultdict(dict)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a case once, and keep what it counted itself."""
        is_result = report.when == "call" or (report.when == "setup" and not report.passed) or report.failed
        if is_result:
            self._files[report.nodeid.partition("::")[0]][report.outcome] += 1
        if report.when == "call" and report.user_properties:
            self._counts[report.nodeid] |= dict(report.user_properties)

    def pytest_sessionfinish(self) -> None:
        """Write the file."""
        import torch

        root = Path(__file__).parents[2]
        revision = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=root, capture_output=True, text=True, check=False
        )
        content = {
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "seconds": round(time.time() - self._begin),
            "revision": revision.stdout.strip() or None,
            "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
            "versions": f"Python {platform.python_version()}, PyTorch {torch.__version__}",
            "files": {name: dict(counter) for name, counter in sorted(self._files.items())},
            "counts": dict(sorted(self._counts.items())),
        }
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def register(config: pytest.Config) -> None:
    """Register the plugin in the reporting process if the environment asks for it."""
    file = os.environ.get(ENVIRONMENT)
    if file and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Results(Path(file)), "onstep-results")
