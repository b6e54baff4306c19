"""Workers and a server over real sockets compute what one process would."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from onstep.diloco.client import DiLoCoClient, RefusedByServerError
from onstep.diloco.protocol.messages import Settings
from onstep.diloco.server import DiLoCoServer
from onstep.diloco.worker import DiLoCoWorker
from tests.diloco.worker.crew import assert_close, data_parallel, nesterov, outer_steps, sgd, small_model, train_crew


def serve(model: nn.Module, settings: Settings, outer: Callable[..., torch.optim.Optimizer] = sgd) -> DiLoCoServer:
    return DiLoCoServer(model, settings=settings, outer_optimizer_factory=outer, port=0, token="secret")


@pytest.mark.parametrize("count", [2, 4])
def test_one_step_rounds_over_sockets_are_data_parallel_sgd(count: int) -> None:
    settings = Settings(num_workers=count, min_workers=count, sync_every=1, codec="fp32")
    with serve(small_model(), settings) as server:
        results = train_crew(lambda: DiLoCoClient(server.address, token="secret"), count, steps=10)
    expected = data_parallel(count, 10, lr=0.1)
    for parameters, metrics in results:
        assert metrics["diloco/version"] == 10
        assert_close(parameters, expected, 1e-10)


@pytest.mark.parametrize("count", [2, 4])
def test_outer_nesterov_over_sockets_is_torchs_on_the_averaged_difference(count: int) -> None:
    settings = Settings(num_workers=count, min_workers=count, sync_every=3, codec="fp32")
    with serve(small_model(), settings, nesterov) as server:
        results = train_crew(lambda: DiLoCoClient(server.address, token="secret"), count, steps=12)
    expected = outer_steps(count, every=3, rounds=4)
    for parameters, _ in results:
        assert_close(parameters, expected, 1e-10)


@pytest.mark.parametrize("codec", ["bf16", "int8", "int4"])
def test_all_workers_have_the_bits_of_the_server(codec: str) -> None:
    settings = Settings(num_workers=2, min_workers=2, sync_every=2, codec=codec, num_fragments=1)
    model = small_model(dtype=torch.float32)
    with serve(model, settings, nesterov) as server:
        results = train_crew(lambda: DiLoCoClient(server.address, token="secret"), 2, 6, dtype=torch.float32)
        with DiLoCoClient(server.address, token="secret") as client:
            newest = client.get_global_params()
    for parameters, _ in results:
        assert all(torch.equal(parameters[name], value) for name, value in newest.items())


def test_two_servers_share_the_parameters() -> None:
    settings = Settings(num_workers=2, min_workers=2, sync_every=2, codec="fp32")
    servers = [
        DiLoCoServer(
            small_model(), settings=settings, outer_optimizer_factory=nesterov, port=0, token="s", share=(index, 2)
        )
        for index in range(2)
    ]
    with servers[0], servers[1]:
        addresses = ",".join(server.address for server in servers)
        results = train_crew(lambda: DiLoCoClient(addresses, token="s"), 2, steps=6)
    for parameters, _ in results:
        assert_close(parameters, outer_steps(2, every=2, rounds=3), 1e-10)


def test_another_model_is_refused_with_the_first_parameter_that_differs() -> None:
    settings = Settings(num_workers=1, min_workers=1)
    other = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 7)).double()
    with serve(small_model(), settings) as server:
        worker = DiLoCoWorker(other, None, server.address, auth_token="secret")
        with pytest.raises(RefusedByServerError, match=r"2\.bias"):
            worker.start()
        with pytest.raises(RefusedByServerError, match="token"):
            DiLoCoWorker(small_model(), None, server.address, auth_token="wrong").start()
