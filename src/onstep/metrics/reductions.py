"""Reduces values across ranks: the maximum of a statistic or memory report, and the logical AND of a flag."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from onstep.distributed.shard_sums import device_of, has_others
from onstep.errors import ConfigError


def reduce_max_memory_across_pp_group(
    memory_report: Mapping[str, int | float], pp_group: Any
) -> Mapping[str, int | float]:
    """The maximum of each entry over the pipeline stages, the first of which holds the most activations.

    One collective over `pp_group`. Integers remain integers. An empty report, or one without other stages, is returned
    unchanged.

    Args:
        memory_report: values by name, with the same names in the same order on all ranks.
        pp_group: the process group of the pipeline stages; None for a single stage.
    """
    if not memory_report or not has_others(pp_group):
        return memory_report
    values = torch.tensor(list(memory_report.values()), dtype=torch.float64, device=device_of(pp_group))
    dist.all_reduce(values, op=dist.ReduceOp.MAX, group=pp_group)
    return {
        name: int(largest) if isinstance(value, Integral) and not isinstance(value, bool) else largest
        for (name, value), largest in zip(memory_report.items(), values.tolist(), strict=True)
    }


def reduce_max_stat_across_model_parallel_group(stat: float | None, mp_group: Any) -> float | None:
    """The maximum of a statistic over the ranks of a group; None if no rank has one.

    One collective over `mp_group`. A rank without the statistic passes None, which is ignored, so negative values work.
    Integers remain exact integers, within 64 bits; a float on any rank makes the result a float. A NaN on any rank is
    the result on all of them.

    Args:
        stat: a number, a one-element tensor on any device (which is read), or None.
        mp_group: the group to reduce over. For None or a group of one rank, `stat` itself is returned; a device tensor
            is then not read.

    Raises:
        ConfigError: if `stat` is not a number, or is an integer that does not fit into 64 bits.
    """
    _check_stat(stat)
    if not has_others(mp_group):
        return stat
    known = None if stat is None else _number(stat)
    kind, word = 0, 0
    if isinstance(known, float):
        kind, word = 2, struct.unpack("<q", struct.pack("<d", known))[0]
    elif known is not None:
        kind, word = 1, known
    own = torch.tensor([kind, word], dtype=torch.int64, device=device_of(mp_group))
    of_ranks = [torch.empty_like(own) for _ in range(dist.get_world_size(mp_group))]
    dist.all_gather(of_ranks, own, group=mp_group)
    pairs = torch.stack(of_ranks).tolist()
    whole = [number for kind, number in pairs if kind == 1]
    floats = [struct.unpack("<d", struct.pack("<q", bits))[0] for kind, bits in pairs if kind == 2]
    if not floats:
        return max(whole, default=None)
    return math.nan if any(map(math.isnan, floats)) else max([*floats, *map(float, whole)])


def logical_and_across_model_parallel_group(input: bool, mp_group: Any) -> bool:
    """Whether `input` is true on every rank of a group.

    One collective over `mp_group`. For None or a group of one rank, the result is this rank's `input`.

    Args:
        input: True or False in any unambiguous form: a Python or NumPy bool, 1 or 0, or a tensor with one such element
            (which is read, on any device).
        mp_group: the group to reduce over.

    Raises:
        ConfigError: for any other `input`, such as None, a string or another number.
    """
    value: object = input
    if isinstance(value, (Tensor, np.generic)) and math.prod(value.shape) == 1:
        value = value.item()
    if not (isinstance(value, (bool, int)) and value in (0, 1)):
        raise ConfigError(f"the input of a logical AND must be true or false, got {input!r}; pass a bool")
    says_yes = bool(value)
    if not has_others(mp_group):
        return says_yes
    all_say = torch.tensor(int(says_yes), dtype=torch.int32, device=device_of(mp_group))
    dist.all_reduce(all_say, op=dist.ReduceOp.MIN, group=mp_group)
    return bool(all_say.item())


def _check_stat(stat: Any) -> None:
    """Refuse anything but a number; only the shape and dtype of a tensor are checked, without reading it."""
    if isinstance(stat, Tensor) and stat.numel() == 1 and not stat.is_complex():
        return
    if stat is not None:
        _number(stat)


def _number(stat: Any) -> int | float:
    """`stat` as a plain number; a tensor is read."""
    value = stat.item() if isinstance(stat, Tensor) and stat.numel() == 1 else stat
    if isinstance(value, (Integral, np.bool_)):
        whole = int(value)
        if not -(2**63) <= whole < 2**63:
            raise ConfigError(f"an integer to reduce must fit into 64 bits, got {whole}; pass it as a float")
        return whole
    if not isinstance(value, Real):
        raise ConfigError(f"a statistic to reduce must be a number or None, got {value!r}; pass None if there is none")
    return float(value)
