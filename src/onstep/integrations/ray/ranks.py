"""Runs a command as one rank of Ray Train, in the thread in which Ray calls training functions."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from onstep.errors import PREEMPTED, OnstepError


def run_command(settings: Mapping[str, Any]) -> int:
    """Run a command of Python, as `onstep launch` and `torchrun` do: a training function for `TorchTrainer`.

    Ray has made the process group; `$RANK`, `$WORLD_SIZE` and the like are set.

    Args:
        settings: `command`, the words after `python`, such as `-m onstep train`, and `directory`, where they are run.

    Returns:
        0, or 75 if the run was preempted and has saved.

    Raises:
        OnstepError: for another exit code, so that Ray starts the ranks again.
    """
    os.chdir(settings["directory"])
    command = list(settings["command"])
    try:
        _run(command)
    except SystemExit as end:
        if end.code == PREEMPTED:
            return PREEMPTED
        if end.code not in (None, 0):
            raise OnstepError(f"{' '.join(command)} has ended with exit code {end.code}; see its output.") from None
    return 0


def _run(command: Sequence[str]) -> None:
    """Run a script, or a module after `-m`, as `__main__`."""
    if command[0] == "-m":
        sys.argv = list(command[1:])
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = list(command)
    sys.path.insert(0, os.path.dirname(os.path.abspath(command[0])))
    runpy.run_path(command[0], run_name="__main__")
