"""Runs to rewind: dropout, accumulation, evaluations and saves, each step logged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from onstep.config import ConfigContainer
from tests.support.small_configs import small_pretrain_config

STEPS = 8


def run_config(corpus: Path, token_cache: Path, output_dir: Path, **changes: Any) -> ConfigContainer:
    """A run of `STEPS` steps that saves every 3; `changes` are keys with `__` for the dot."""
    config = small_pretrain_config(corpus, token_cache, layers=2, width=32)
    config.run.name, config.run.output_dir = "x", str(output_dir)
    config.train.train_iters, config.train.global_batch_size, config.train.micro_batch_size = STEPS, 4, 2
    config.model.hidden_dropout = config.model.attention_dropout = 0.1
    config.validation.eval_interval, config.validation.eval_iters = 2, 1
    config.logger.log_interval, config.checkpoint.save_interval = 1, 3
    for key, value in changes.items():
        section, _, name = key.partition("__")
        setattr(getattr(config, section), name, value)
    return config


def content_of(directory: Path) -> dict[str, tuple[bytes, int]]:
    """Every file with its bytes and its time of change."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path.relative_to(directory)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}
