"""What a site does when others leave in the middle of a round, or their number changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from onstep.diloco import DiLoCoWorker
from onstep.diloco.group.sites import SiteLostError
from onstep.errors import ConfigError
from tests.diloco.worker.crew import small_model


class Echo:
    """A group of two sites of which the other one sends what this one does, `gathers` times."""

    def __init__(self) -> None:
        self.members, self.gathers = 2, 100

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return self.members

    def allgather(self, found: list[list[torch.Tensor]], tensors: list[torch.Tensor], options: object) -> Echo:
        if self.gathers == 0:
            raise RuntimeError("Connection closed by peer")
        self.gathers -= 1
        for one in found[0]:
            one.copy_(tensors[0])
        return self

    def broadcast(self, tensors: list[torch.Tensor], options: object) -> Echo:
        return self

    def wait(self) -> None:
        pass


def started(group: Any) -> DiLoCoWorker:
    worker = DiLoCoWorker(small_model(dtype=torch.float32), None, group=group, sync_every=1)
    worker.start()
    return worker


def test_a_group_whose_members_change_is_refused() -> None:
    group = Echo()
    worker = started(group)
    group.members = 3
    with pytest.raises(SiteLostError, match="the group has 3 sites now where it had 2"):
        worker.end_step()
    worker.stop(merge=False)


@pytest.mark.parametrize("gathers", [1, 2])
def test_a_step_that_was_not_compared_is_in_no_checkpoint(gathers: int) -> None:
    group = Echo()
    worker = started(group)
    worker.end_step()
    group.gathers = gathers  # of a round: what is submitted, the submissions, the hashes
    with pytest.raises(SiteLostError, match="Connection closed by peer"):
        worker.end_step()
    if gathers < 2:
        assert worker.state_dict()["group"]["fragments"][0]["version"] == 1
    else:
        with pytest.raises(SiteLostError, match="was not compared with the other sites, so it is in no checkpoint"):
            worker.state_dict()
    worker.stop(merge=False)


def test_a_worker_needs_a_server_or_a_group() -> None:
    with pytest.raises(ConfigError, match="neither a server nor a group"):
        DiLoCoWorker(small_model(), None)
