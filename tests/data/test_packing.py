"""First-fit packing, against its definition."""

from __future__ import annotations

import random

import pytest

from onstep.data.chat.packing import first_fit


def by_definition(lengths: list[int], capacity: int) -> list[list[int]]:
    bins: list[list[int]] = []
    for number, length in enumerate(lengths):
        for held in bins:
            if sum(lengths[item] for item in held) + length <= capacity:
                held.append(number)
                break
        else:
            bins.append([number])
    return bins


@pytest.mark.parametrize("seed", range(8))
def test_each_item_goes_into_the_first_bin_with_room(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randint(1, rng.choice([5, 20])) for _ in range(rng.randint(1, 300))]
    packing = first_fit(lengths, 20)
    assert [packing.bin(number) for number in range(len(packing))] == by_definition(lengths, 20)


def test_full_sequences_have_a_bin_each() -> None:
    packing = first_fit([4, 4, 4], 4)
    assert [packing.bin(number) for number in range(len(packing))] == [[0], [1], [2]]
