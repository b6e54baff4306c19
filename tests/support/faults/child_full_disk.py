"""Saves more than a disk of 8 MiB takes; a script for: directory, whether the space is checked before. Prints JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from onstep.checkpoint.catalog.discovery import newest_verified
from onstep.checkpoint.checkpoint_manager import CheckpointManager, SaveRequest
from onstep.checkpoint.components import SharingPattern, StateComponent
from onstep.distributed import World
from onstep.errors import CheckpointError
from tests.support.faults.fault_saves import Holder, debris


def save(root: Path, step: int, size_mebibytes: int, checked: bool) -> str:
    """The error of a save; empty if there was none."""
    holder = Holder(step, "a")
    holder.state["weights"] = torch.full((size_mebibytes * 2**18,), float(step))
    manager = CheckpointManager(root, World(), validate_free_space=checked)
    try:
        manager.save(SaveRequest(step, [StateComponent("model", holder, SharingPattern.GLOBAL)], config={}))
    except CheckpointError as error:
        return str(error)
    finally:
        manager.close()
    return ""


def main() -> None:
    """Two saves that fit, one too large between them."""
    root, checked = Path(sys.argv[1]), sys.argv[2] == "checked"
    report = {"first": save(root, 10, 2, checked), "too large": save(root, 20, 16, checked)}
    newest = newest_verified(root)
    report |= {"newest": newest and newest.step, "debris": debris(root)}
    report |= {"after": save(root, 30, 2, checked), "steps": sorted(path.name for path in root.iterdir())}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
