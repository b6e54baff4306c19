"""Collects what must be the same on all ranks of a run: its configuration, the versions of libraries, and its code."""

from __future__ import annotations

import sys
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

from onstep.config import ConfigContainer
from onstep.config.keys import leaves
from onstep.config.suggestions import shown
from onstep.training.runs.provenance import versions
from onstep.training.runs.user_code import is_users

_OF_A_RANK = (
    *(
        "dist.device",
        "env_vars.",
        "trainer.",
        "run.output_dir",
        "run.control",
        "run.check_memory",
        "profiling.memory_snapshot_path",
    ),
    *("dataset.paths", "dataset.cache_dir", "dataset.stream_validation_paths", "dataset.num_workers"),
    *("dataset.pin_memory", "dataset.persistent_workers", "dataset.prefetch_factor", "dataset.multiprocessing_context"),
    *("tokenizer.", "logger.console", "logger.logging_", "logger.log_progress", "logger.report_"),
    *("logger.tensorboard_dir", "logger.wandb_", "logger.mlflow_", "logger.comet_", "logger.memory_keys"),
)
"""Keys, or how they begin, whose values may be those of one rank: its device and disks, and what it shows.

The directory of a run is that of rank 0, which `check_seen` looks for on the others.
"""


def facts_of(config: ConfigContainer) -> dict[str, str]:
    """What a rank has, by name, in a few characters that differ where that does.

    Args:
        config: the configuration of the run on this rank.
    """
    found = {f"the version of {name}": text for name, text in versions().items()}
    found["the version of python"] = ".".join(map(str, sys.version_info[:2]))
    for key, section, name in leaves(config):
        if not key.startswith(_OF_A_RANK):
            found[key] = _text(getattr(section, name))
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file is not None and is_users(name):
            with suppress(OSError):
                found[f"the code of {name}"] = f"{zlib.crc32(Path(file).read_bytes()):08x}"
    return found


def _text(value: Any) -> str:
    whole, text = repr(value), shown(value)
    return whole if text == whole else f"{text}, crc {zlib.crc32(whole.encode()):08x}"
