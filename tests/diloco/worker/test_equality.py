"""What workers and server compute together is what one process would compute, over real sockets or without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from onstep.diloco.client import DiLoCoClient, RefusedByServerError
from onstep.diloco.protocol.messages import Settings
from onstep.diloco.server import DiLoCoServer
from onstep.diloco.worker import DiLoCoWorker
from tests.diloco.worker.crew import (
    assert_close,
    data_parallel,
    nesterov,
    outer_steps,
    sgd,
    small_model,
    train_crew,
    values,
)
from tests.diloco.worker.local_server import LocalServer

Serve = Callable[..., AbstractContextManager[tuple[Callable[[], Any], Callable[[], dict[str, Tensor]]]]]


def new_server(settings: Settings, outer: Callable[[list[Tensor]], Optimizer] = sgd, **options: Any) -> DiLoCoServer:
    return DiLoCoServer(
        options.pop("model", None) or small_model(),
        settings=settings,
        outer_optimizer_factory=outer,
        port=0,
        token="secret",
        **options,
    )


@pytest.fixture(params=["local", "sockets"])
def serve(request: pytest.FixtureRequest) -> Serve:
    """Serves a run; gives a function that makes a client, and one that returns the newest parameters."""

    @contextmanager
    def run(settings: Settings, outer: Any = sgd, dtype: torch.dtype = torch.float64) -> Iterator[Any]:
        model = small_model(dtype=dtype)
        if request.param == "local":
            local = LocalServer(values(model), settings, outer)
            yield lambda: local, local.parameters
            return
        with new_server(settings, outer, model=model) as server:
            yield lambda: DiLoCoClient(server.address, token="secret"), server.get_global_params

    return run


@pytest.mark.parametrize("count", [2, 4])
def test_one_step_rounds_with_a_plain_outer_step_are_data_parallel_sgd(serve: Serve, count: int) -> None:
    settings = Settings(num_workers=count, min_workers=count, sync_every=1, codec="fp32")
    with serve(settings) as (connect, _):
        results = train_crew(connect, count, steps=10)
    expected = data_parallel(count, 10, lr=0.1)
    for parameters, metrics in results:
        assert metrics["diloco/version"] == metrics["diloco/sync_count"] == 10
        assert_close(parameters, expected, 1e-10)


@pytest.mark.parametrize("count", [2, 4])
def test_outer_nesterov_is_torchs_on_the_average_of_the_differences(serve: Serve, count: int) -> None:
    settings = Settings(num_workers=count, min_workers=count, sync_every=3, codec="fp32")
    with serve(settings, nesterov) as (connect, _):
        results = train_crew(connect, count, steps=12)
    expected = outer_steps(count, every=3, rounds=4)
    for parameters, _ in results:
        assert_close(parameters, expected, 1e-10)


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4"])
def test_all_workers_have_the_bits_of_the_server_with_every_codec(serve: Serve, codec: str) -> None:
    settings = Settings(num_workers=3, min_workers=3, sync_every=2, codec=codec)
    with serve(settings, nesterov, torch.float32) as (connect, newest):
        results = train_crew(connect, 3, steps=8, dtype=torch.float32)
        expected = newest()
    for parameters, metrics in results:
        assert metrics["diloco/version"] == 4
        assert (metrics["diloco/quantization_error"] == 0) is (codec == "fp32")
        assert all(torch.equal(parameters[name], value) for name, value in expected.items())


def test_another_model_is_refused_with_the_first_parameter_that_differs() -> None:
    other = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 7)).double()
    with new_server(Settings(num_workers=1, min_workers=1)) as server:
        with pytest.raises(RefusedByServerError, match=r"2\.bias"):
            DiLoCoWorker(other, None, server.address, auth_token="secret").start()
        with pytest.raises(RefusedByServerError, match="token"):
            DiLoCoWorker(small_model(), None, server.address, auth_token="wrong").start()
