"""What workers and server compute together is what one process would compute."""

from __future__ import annotations

import pytest
import torch

from onstep.diloco.protocol.messages import Settings
from tests.diloco.worker.crew import assert_close, data_parallel, nesterov, outer_steps, small_model, train_crew, values
from tests.diloco.worker.local_server import LocalServer


@pytest.mark.parametrize("count", [2, 4])
def test_one_step_rounds_with_a_plain_outer_step_are_data_parallel_sgd(count: int) -> None:
    settings = Settings(num_workers=count, min_workers=count, sync_every=1, codec="fp32")
    server = LocalServer(values(small_model()), settings)
    results = train_crew(lambda: server, count, steps=12)
    expected = data_parallel(count, 12, lr=0.1)
    for parameters, metrics in results:
        assert metrics["diloco/sync_count"] == 12
        assert_close(parameters, expected, 1e-10)


def test_outer_nesterov_is_torchs_on_the_average_of_the_differences() -> None:
    count, every, rounds = 2, 3, 4
    settings = Settings(num_workers=count, min_workers=count, sync_every=every, codec="fp32")
    server = LocalServer(values(small_model()), settings, nesterov)
    results = train_crew(lambda: server, count, steps=every * rounds)

    expected = outer_steps(count, every, rounds)
    for parameters, _ in results:
        assert_close(parameters, expected, 1e-10)


@pytest.mark.parametrize("codec", ["fp32", "bf16", "fp16", "int8", "int4"])
def test_all_workers_have_the_same_bits_with_every_codec(codec: str) -> None:
    settings = Settings(num_workers=3, min_workers=3, sync_every=2, codec=codec)
    server = LocalServer(values(small_model(dtype=torch.float32)), settings, nesterov)
    results = train_crew(lambda: server, 3, steps=8, dtype=torch.float32)
    for parameters, metrics in results:
        assert metrics["diloco/version"] == 4
        assert (metrics["diloco/quantization_error"] == 0) is (codec == "fp32")
        for name, value in server.parameters().items():
            assert torch.equal(parameters[name], value)
