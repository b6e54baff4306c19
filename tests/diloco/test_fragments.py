"""Fragments are whole blocks, cover everything once, and are due once a cycle."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from onstep.diloco.fragments import assign, due
from onstep.diloco.protocol.messages import ParameterSpec
from onstep.errors import ConfigError


def transformer(blocks: int) -> list[ParameterSpec]:
    specs = [ParameterSpec("model.embed.weight", (100, 8), "F32"), ParameterSpec("model.norm.weight", (8,), "F32")]
    for index in range(blocks):
        specs += [
            ParameterSpec(f"model.layers.{index}.attention.qkv.weight", (24, 8), "F32"),
            ParameterSpec(f"model.layers.{index}.experts.1.up.weight", (32, 8), "F32"),
            ParameterSpec(f"model.layers.{index}.norm.bias", (8,), "F32"),
        ]
    return specs


@pytest.mark.parametrize("fragments", [1, 2, 3, 5])
def test_everything_is_in_one_fragment_and_the_order_of_the_parameters_does_not_matter(fragments: int) -> None:
    specs = transformer(12)
    parts = assign(specs, fragments)
    assert len(parts) == fragments
    assert sorted(spec.name for part in parts for spec in part) == sorted(spec.name for spec in specs)
    random.Random(1).shuffle(specs)
    assert assign(specs, fragments) == parts


def test_a_block_is_never_divided_and_a_fragment_has_early_and_late_ones() -> None:
    parts = assign(transformer(12), 3)
    blocks = [{int(spec.name.split(".")[2]) for spec in part if ".layers." in spec.name} for part in parts]
    assert blocks == [{0, 3, 6, 9}, {1, 4, 7, 10}, {2, 5, 8, 11}]


@pytest.mark.parametrize("fragments", [0, 15])
def test_more_parts_than_there_are_blocks_and_modules_are_refused(fragments: int) -> None:
    with pytest.raises(ConfigError, match=r"must be (at most|>= 1)"):
        assign(transformer(12), fragments)


@pytest.mark.parametrize(("every", "fragments"), [(1, 1), (50, 1), (50, 3), (7, 3), (2, 5), (500, 8)])
def test_every_fragment_is_due_once_a_cycle_and_the_last_at_its_end(every: int, fragments: int) -> None:
    order = [fragment for step in range(1, every + 1) for fragment in due(step, every, fragments)]
    assert order == list(range(fragments))
    assert due(every, every, fragments)[-1] == fragments - 1


def test_the_simulator_can_use_sizes_and_fragments_without_torch() -> None:
    code = "import sys, onstep.diloco.fragments, onstep.diloco.sizes; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
