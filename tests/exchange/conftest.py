"""A directory with a small package named `transformers`, and a way to start Python there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from onstep.exchange.names import NAMES

Start = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Runs Python with these words in a directory where `transformers` is a package of empty classes."""
    package = tmp_path / "installed" / "transformers"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "import importlib\n"
        "def __getattr__(name):\n"
        "    if name.startswith('_'):\n"
        "        raise AttributeError(name)\n"
        "    homes = {'Trainer': 'trainer', 'TrainingArguments': 'training_args'}\n"
        "    home = homes.get(name, 'trainer_callback')\n"
        "    return getattr(importlib.import_module('transformers.' + home), name)\n"
    )
    for module in ("transformers.training_args", "transformers.trainer_callback"):
        names = [
            name for name, place in NAMES[module].items() if place.startswith(("onstep.events:", "onstep.config:"))
        ]
        classes = "".join(f"class {name}: ...\n" for name in [*names, "Further"])
        (package / f"{module.rpartition('.')[2]}.py").write_text(f"{classes}HELD = {names[0]}\n")
    (package / "trainer.py").write_text("class Trainer: ...\n")
    (package / "integrations.py").write_text(
        "from .trainer_callback import TrainerCallback\nclass WandbCallback(TrainerCallback): ...\n"
    )
    (tmp_path / "installed" / "library.py").write_text(
        "from transformers import TrainerCallback\nclass Own(TrainerCallback): ...\n"
    )

    def run(*words: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
        paths = [str(tmp_path / "installed"), os.environ.get("PYTHONPATH", "")]
        return subprocess.run(
            [sys.executable, *map(str, words)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **environment},
            capture_output=True,
            text=True,
            check=False,
        )

    return run
