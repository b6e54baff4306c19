"""The configurations of torchtitan and accelerate that the documentation converts."""

from __future__ import annotations

import math
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from onstep.config import parse_yaml
from tests.docs.pages import ROOT, blocks
from tests.support.forked_processes import Processes

PAGE = ROOT / "docs" / "coming-from" / "torchtitan.md"
OURS = [parse_yaml(block.code) for block in blocks(PAGE, "yaml")]
SMALL = ["model.hidden_size=16", "model.num_attention_heads=2", "model.ffn_hidden_size=32", "train.train_iters=4"]
QUIET = ["logger.log_interval=0", "run.save_weights=false", "validation.eval_iters=0", "dist.device=cpu"]


def leaves(values: dict[str, Any], path: str = "") -> list[str]:
    """The dotted keys of nested values."""
    found = []
    for key, value in values.items():
        found += leaves(value, f"{path}{key}.") if isinstance(value, dict) else [f"{path}{key}"]
    return found


def test_each_key_of_the_files_is_in_the_table() -> None:
    table = PAGE.read_text().partition("## Shards")[0]
    theirs = [key for block in blocks(PAGE, "toml") for key in leaves(tomllib.loads(block.code))]
    of_accelerate = [key.rpartition(".")[2] for block in blocks(PAGE, "yml") for key in leaves(parse_yaml(block.code))]
    ours = [key for values in OURS for key in leaves(values) if key != "model.num_layers"]
    for key in (*theirs, *of_accelerate, *ours):
        assert re.search(rf"`{re.escape(key)}\b", table), key
    assert len(OURS) == len(blocks(PAGE, "toml")) == 4


@pytest.mark.slow
@pytest.mark.distributed
def test_each_converted_configuration_has_the_losses_of_one_process(processes: Processes, tmp_path: Path) -> None:
    settings = {"text": str(ROOT / "LICENSE"), "cache": str(tmp_path / "cache"), "keys": [*SMALL, *QUIET]}
    alone = [{key: value for key, value in values.items() if key not in ("parallel", "fsdp")} for values in OURS]
    jobs = "tests.support.jobs.converted_jobs"
    [expected] = processes.results(jobs, "losses", tmp_path, {**settings, "files": alone}, ranks=1)
    sizes = [math.prod(value for key, value in one["parallel"].items() if _counts(key)) for one in OURS]
    assert sizes == [2, 4, 4, 2]
    for ranks in (2, 4):
        numbers = [number for number, size in enumerate(sizes) if size == ranks]
        files = [OURS[number] for number in numbers]
        for found in processes.results(jobs, "losses", tmp_path, {**settings, "files": files}, ranks=ranks):
            for number, losses in zip(numbers, found, strict=True):
                assert len(losses) == 4
                assert losses == pytest.approx(expected[number], rel=1e-5), OURS[number]["parallel"]


def _counts(key: str) -> bool:
    return key.endswith("_size") and not key.startswith("virtual")
