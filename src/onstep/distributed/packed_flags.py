"""Flags of ranks as counts in the bits of few numbers: gloo sums one element much faster than several."""

from __future__ import annotations

from collections.abc import Sequence

_NUM_BITS = 63
"""Those of a number in which ranks count."""


def pack(flags: Sequence[object], num_ranks: int) -> list[int]:
    """Numbers with a count of each flag: 1 if it is set. Summed over the ranks, they have the sums of the counts.

    Args:
        flags: of this rank.
        num_ranks: how many ranks set them at most.
    """
    width, size = _layout(num_ranks)
    parts = [flags[start : start + size] for start in range(0, len(flags), size)]
    return [sum(bool(flag) << width * place for place, flag in enumerate(part)) for part in parts]


def unpack(numbers: Sequence[int], num_flags: int, num_ranks: int) -> list[int]:
    """The count of each flag; the last one has all bits that are left.

    Args:
        numbers: the sums over the ranks.
        num_flags: how many flags there are.
        num_ranks: as for `pack`.
    """
    width, size = _layout(num_ranks)
    shifted = [numbers[flag // size] >> width * (flag % size) for flag in range(num_flags)]
    return [*(one & (1 << width) - 1 for one in shifted[:-1]), shifted[-1]]


def _layout(num_ranks: int) -> tuple[int, int]:
    """The bits of a count, and the counts in a number."""
    width = num_ranks.bit_length()
    return width, _NUM_BITS // width
