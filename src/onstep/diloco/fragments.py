"""Divides the parameters into fragments of whole transformer blocks, and schedules their submissions.

Source: Douillard et al. 2025, "Streaming DiLoCo with overlapping communication", section 2 (strided fragments and
their offsets). Does not import torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from onstep.diloco.protocol.messages import ParameterSpec
from onstep.errors import require

_BLOCK = re.compile(r"^(.*?(?:^|\.)\d+)(?:\.|$)")
"""The path of a block: up to and with the first number of a name, as in `model.layers.3.mlp.weight`."""


def assign(specs: Sequence[ParameterSpec], num_fragments: int) -> tuple[tuple[ParameterSpec, ...], ...]:
    """The parameters of each fragment, sorted by name; the same for the same parameters in any order.

    Blocks are dealt out in turn, so that a fragment has early and late ones; then each remaining module (embedding,
    final norm, head) goes to the fragment with the fewest bytes.

    Raises:
        ConfigError: if there are fewer blocks and modules than fragments.
    """
    require(num_fragments >= 1, "num_fragments", ">= 1", num_fragments, "; 1 submits all parameters together.")
    units = _units(specs)
    rule = f"at most {len(units)}, the number of blocks and modules of this model"
    require(num_fragments <= len(units), "num_fragments", rule, num_fragments)
    return tuple(tuple(sorted(one, key=lambda spec: spec.name)) for one in _dealt(units, num_fragments))


def _units(specs: Iterable[ParameterSpec]) -> dict[str, list[ParameterSpec]]:
    """The parameters of each block, and of each module outside of blocks."""
    units: dict[str, list[ParameterSpec]] = {}
    for spec in sorted(specs, key=lambda spec: spec.name):
        units.setdefault(_unit(spec.name), []).append(spec)
    return units


def _unit(name: str) -> str:
    block = _BLOCK.match(name)
    return block[1] if block else name.rpartition(".")[0]


def _dealt(units: dict[str, list[ParameterSpec]], num_fragments: int) -> list[list[ParameterSpec]]:
    fragments: list[list[ParameterSpec]] = [[] for _ in range(num_fragments)]
    blocks = sorted((unit for unit in units if unit[-1:].isdigit()), key=_depth)
    for index, unit in enumerate(blocks):
        fragments[index % num_fragments] += units[unit]
    others = [specs for unit, specs in units.items() if unit not in set(blocks)]
    for specs in sorted(others, key=_size, reverse=True):
        min(fragments, key=lambda fragment: (bool(fragment), _size(fragment))).extend(specs)
    return fragments


def _depth(unit: str) -> tuple[str, int]:
    path, _, number = unit.rpartition(".")
    return path, int(number)


def _size(specs: Sequence[ParameterSpec]) -> int:
    return sum(math.prod(spec.shape) for spec in specs)


def due(step: int, sync_every: int, num_fragments: int) -> tuple[int, ...]:
    """The fragments to submit after a local step, counted from 1 in each cycle of `sync_every` steps.

    Each fragment is due once a cycle, at even distances, the last at its end.
    """
    return tuple(k for k in range(num_fragments) if -(-(k + 1) * sync_every // num_fragments) == step)
