"""One of several ranks: begins an asynchronous save and closes without finalising it, as after an error."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

from onstep.checkpoint import CheckpointManager, SaveRequest, SharingPattern, StateComponent
from onstep.config.parts import DistributedInitConfig
from onstep.distributed import open_world


class Value:
    def state_dict(self) -> dict[str, Any]:
        return {"value": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def main(folder: Path) -> None:
    logging.basicConfig(filename=f"{folder}.rank-{os.environ['RANK']}.log", level=logging.WARNING)
    world = open_world(DistributedInitConfig(device="cpu"))
    manager = CheckpointManager(folder, world, async_save=True)
    manager.save(SaveRequest(1, [StateComponent("value", Value(), SharingPattern.PER_RANK)], {}))
    if not world.is_main:
        manager.close()
    world.barrier()  # rank 0 removes the folder that the other may still write into
    manager.close()
    world.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
