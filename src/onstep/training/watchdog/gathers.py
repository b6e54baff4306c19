"""Recognizes ranks that wait for the weights of a block which other ranks do not call."""

from __future__ import annotations

import re
from collections.abc import Mapping

from onstep.training.watchdog.rank_report import RankReport

_GATHER = re.compile(r"(?m)^.*_fully_shard.* in (?:foreach_all_gather|wait_for_unshard|unshard)$")


def gather_hint(rank_reports: Mapping[int, RankReport], stacks: Mapping[int, str]) -> str:
    """What to change if all ranks wait in a collective, but only some of them to gather weights; else empty.

    Args:
        rank_reports: the record of every rank.
        stacks: the stacks of those that provided them.
    """
    waiting = [rank for rank, text in sorted(stacks.items()) if _GATHER.search(text)]
    others = [rank for rank, one in sorted(rank_reports.items()) if rank not in waiting and one.is_waiting]
    if not waiting or not others or len(waiting) + len(others) < len(rank_reports):
        return ""
    return (
        f"{_named(waiting)} to gather the weights of a block, and {_named(others)} in another collective. All ranks "
        f"must call each block that is divided by fully_shard equally often. A module that is called in some "
        f"micro-batches only must be gathered with its caller: set fsdp.wrap to classes that leave out that of the "
        f"module, and contain that of its caller."
    )


def _named(ranks: list[int]) -> str:
    return f"rank {ranks[0]} waits" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} wait"
