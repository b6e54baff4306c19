"""What workers and server compute together is what one process would compute."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from onstep.diloco.protocol.messages import Settings
from tests.diloco.worker.crew import batches, small_model, train, train_crew, values
from tests.diloco.worker.local_server import LocalServer


def data_parallel(count: int, steps: int, lr: float) -> dict[str, Tensor]:
    """Synchronous data-parallel SGD over the batches of all workers."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for step in zip(*(batches(worker, steps) for worker in range(count)), strict=True):
        optimizer.zero_grad()
        losses = [nn.functional.mse_loss(model(inputs), targets) for inputs, targets in step]
        torch.stack(losses).mean().backward()
        optimizer.step()
    return values(model)


@pytest.mark.parametrize("count", [2, 4])
def test_one_step_rounds_with_a_plain_outer_step_are_data_parallel_sgd(count: int) -> None:
    settings = Settings(num_workers=count, min_workers=count, sync_every=1, codec="fp32")
    server = LocalServer(values(small_model()), settings)
    results = train_crew(lambda: server, count, steps=12)
    expected = data_parallel(count, 12, lr=0.1)
    for parameters, metrics in results:
        assert metrics["diloco/sync_count"] == 12
        for name, value in parameters.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-10)


def nesterov(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def test_outer_nesterov_is_torchs_on_the_average_of_the_differences() -> None:
    count, every, rounds = 2, 3, 4
    settings = Settings(num_workers=count, min_workers=count, sync_every=every, codec="fp32")
    server = LocalServer(values(small_model()), settings, nesterov)
    results = train_crew(lambda: server, count, steps=every * rounds)

    outer = small_model()
    optimizer = nesterov(list(outer.parameters()))
    for round_ in range(rounds):
        ends = []
        for worker in range(count):
            model = small_model()
            model.load_state_dict(outer.state_dict())
            data = batches(worker, every * rounds)[round_ * every : (round_ + 1) * every]
            train(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
            ends.append(values(model))
        for name, parameter in outer.named_parameters():
            parameter.grad = sum(parameter.detach() - end[name] for end in ends) / count
        optimizer.step()
    for parameters, _ in results:
        for name, value in parameters.items():
            torch.testing.assert_close(value, outer.get_parameter(name).detach(), rtol=0, atol=1e-10)


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
