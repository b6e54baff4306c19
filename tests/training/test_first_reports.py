"""What ranks know of each other at the start of a run."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from onstep.training.watchdog.exchange import RankExchange


def test_a_rank_learns_of_a_later_rank_0_before_its_next_look_so_that_its_early_death_has_a_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    later, first = (RankExchange(rank, 2, interval=1000) for rank in (1, 0))
    later.start()
    assert later.has_published.wait(10)
    assert not later.has_met.is_set()
    first.start()
    assert later.has_met.wait(10)
    assert later.rank_reports()[0].rank == 0
    for one in (later, first):
        one.stop(0)
