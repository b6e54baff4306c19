"""Workers that each take a share of the data read every sample of an epoch once."""

from __future__ import annotations

import pytest

from onstep.data.loaders.train_loader import TrainLoader
from onstep.errors import DataError


def loader(count: int = 22, **options: object) -> TrainLoader:
    return TrainLoader(list(range(count)), micro_batch_size=2, global_batch_size=2, seed=3, **options)  # type: ignore[arg-type]


def epoch_of(one: TrainLoader) -> list[int]:
    ids: list[int] = []
    while (step := one.read(1)) is not None:
        assert step.sample_ids is not None
        ids += [sample for row in step.sample_ids for sample in row]
    return ids


@pytest.mark.parametrize("count", [1, 2, 3])
def test_shares_are_disjoint_and_together_the_epoch(count: int) -> None:
    shares = []
    for index in range(count):
        one = loader(drop_last=False)
        one.take_share(index, count)
        assert one.samples_per_epoch in (22 // count, -(-22 // count))
        shares.append([epoch_of(one), epoch_of(one)])
    for epoch in range(2):
        assert sorted(sample for share in shares for sample in share[epoch]) == list(range(22))
    assert shares[0][0] != shares[0][1]


def test_a_share_that_was_used_begins_where_that_ended_and_is_whole_nevertheless() -> None:
    whole, rest = loader(), loader()
    whole.take_share(1, 2)
    rest.take_share(1, 2, start=4)
    before, after = epoch_of(whole), epoch_of(rest)
    assert after[: len(before) - 4] == before[4:]
    assert len(after) == len(set(after)) == 10


def test_a_position_in_a_share_is_found_again() -> None:
    one, other = loader(), loader()
    one.take_share(0, 2, start=3)
    one.read(1)
    other.take_share(0, 2, start=3)
    other.load_state_dict(one.state_dict())
    assert epoch_of(other) == epoch_of(one)


def test_a_share_that_is_too_small_or_is_none_is_refused() -> None:
    with pytest.raises(DataError, match="1 samples, fewer than one global batch"):
        loader().take_share(0, 22)
    with pytest.raises(DataError, match="a share must have an index >= 0 and < its count"):
        loader().take_share(2, 2)
