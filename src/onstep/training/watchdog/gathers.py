"""Recognizes ranks that wait for the weights of a block which other ranks do not call."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from onstep.config.parallel_sizes import places
from onstep.training.watchdog.rank_report import RankReport

_GATHER = re.compile(r"(?m)^.*_fully_shard.* in (?:foreach_all_gather|wait_for_unshard|unshard)$")


def gather_hint(
    rank_reports: Mapping[int, RankReport], stacks: Mapping[int, str], place: Callable[[int], str] = "rank {}".format
) -> str:
    """What to change if all ranks wait in a collective, but only some of them to gather weights; else empty.

    Args:
        rank_reports: the record of every rank.
        stacks: the stacks of those that provided them.
        place: names a rank.
    """
    waiting = [rank for rank, text in sorted(stacks.items()) if _GATHER.search(text)]
    others = [rank for rank, one in sorted(rank_reports.items()) if rank not in waiting and one.is_waiting]
    if not waiting or not others or len(waiting) + len(others) < len(rank_reports):
        return ""
    return (
        f"{_named(waiting, place)} to gather the weights of a block, and {_named(others, place)} in another "
        f"collective. All ranks must call each block that is divided by fully_shard equally often. A module that is "
        f"called in some micro-batches only must be gathered with its caller: set fsdp.wrap to classes that leave out "
        f"that of the module, and contain that of its caller."
    )


def _named(ranks: list[int], place: Callable[[int], str]) -> str:
    return f"{places(ranks, place)} {'waits' if len(ranks) == 1 else 'wait'}"
