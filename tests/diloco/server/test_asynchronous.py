"""The defaults of asynchronous mode follow the number of workers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from onstep.diloco.client import DiLoCoClient
from onstep.diloco.outer import DelayedNesterov
from onstep.diloco.protocol.messages import Settings
from onstep.diloco.server import DiLoCoServer
from onstep.diloco.worker.divergence import DivergenceWatch


def group_of(server: DiLoCoServer) -> dict[str, object]:
    return dict(server._state.fragments[0].groups[0])


@pytest.mark.parametrize("is_async", [False, True])
def test_the_outer_optimizer_is_the_same_with_rounds_and_without(is_async: bool) -> None:
    with DiLoCoServer({"weight": torch.zeros(4)}, 3, async_mode=is_async, port=0, token="t") as server:
        assert {"lr": 0.7, "momentum": 0.6}.items() <= group_of(server).items()


def test_a_server_applies_submissions_by_delayed_nesterov_for_as_many_workers_as_it_expects(tmp_path: Path) -> None:
    weights = {"weight": torch.zeros(4)}
    with DiLoCoServer(weights, 3, async_mode=True, port=0, token="t", output_dir=tmp_path) as server:
        assert isinstance(server._state.fragments[0].optimizer, DelayedNesterov)
        assert {"buffer_size": 3, "momentum": 0.6}.items() <= group_of(server).items()
        with DiLoCoClient(server.address, token="t") as client:
            client.control("update_num_workers", {"num_workers": 5})
        assert {"buffer_size": 5, "momentum": 0.6}.items() <= group_of(server).items()
    with DiLoCoServer(None, 3, async_mode=True, port=0, token="t", output_dir=tmp_path) as server:
        assert {"buffer_size": 5, "momentum": 0.6}.items() <= group_of(server).items()


def test_a_momentum_that_was_chosen_stays_with_another_number_of_workers() -> None:
    chosen: Callable[..., torch.optim.Optimizer] = lambda some: torch.optim.SGD(some, lr=0.7, momentum=0.2)  # noqa: E731
    weights = {"weight": torch.zeros(4)}
    with DiLoCoServer(weights, 3, async_mode=True, port=0, token="t", outer_optimizer_factory=chosen) as server:
        with DiLoCoClient(server.address, token="t") as client:
            client.control("update_num_workers", {"num_workers": 5})
        assert {"buffer_size": 5, "momentum": 0.2}.items() <= group_of(server).items()


def test_another_optimizer_or_a_buffer_of_0_makes_a_step_at_each_submission() -> None:
    weights = {"weight": torch.zeros(4)}
    for options in ({"dn_buffer_size": 0}, {"outer_optimizer_factory": torch.optim.Adam}):
        with DiLoCoServer(weights, 3, async_mode=True, port=0, token="t", **options) as server:  # type: ignore[arg-type]
            assert not isinstance(server._state.fragments[0].optimizer, DelayedNesterov)


def test_a_divergence_is_named_once_with_the_remedy_of_its_mode(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    watch = DivergenceWatch(Settings(mode="async"))
    for step, loss in enumerate([5.5, 4.0, 2.3, 3.0, 2.4, 3.1, 3.4]):
        watch.note(loss, step)
    assert not watch.is_diverging
    for step in range(7, 12):
        watch.note(4.8, step)
    assert watch.is_diverging
    (record,) = caplog.records
    assert record.getMessage() == (
        "DiLoCo: the run diverges: the loss was 2.3 at its lowest and is 4.8 at step 7; submissions are applied one by "
        "one here (--async): `onstep diloco control` can lower the outer momentum and learning rate of the server, and "
        "a run without --async learns better"
    )


def test_a_loss_that_is_not_a_number_counts_as_high_and_small_losses_are_noise() -> None:
    watch = DivergenceWatch(Settings())
    for loss in (0.01, 0.05, 0.3, 0.4):
        watch.note(loss, 0)
    assert not watch.is_diverging
    for _ in range(3):
        watch.note(float("nan"), 0)
    assert watch.is_diverging
