"""Several workers in threads, each with its own model and data, and the reference that they are compared with."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from onstep.checkpoint.format.codec import encode_state
from onstep.checkpoint.format.decoding import decode_state
from onstep.diloco.protocol.messages import Settings
from onstep.diloco.worker import DiLoCoWorker
from tests.diloco.worker.local_server import LocalServer
from tests.support.waiting import PATIENCE

ALONE = Settings(num_workers=1, min_workers=1, sync_every=2, codec="fp32")


def small_model(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).to(dtype)


def batches(worker: int, steps: int, dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(100 + worker)
    return [
        (torch.randn(4, 3, generator=generator, dtype=dtype), torch.randn(4, 2, generator=generator, dtype=dtype))
        for _ in range(steps)
    ]


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[tuple[Tensor, Tensor]]) -> None:
    for inputs, targets in data:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()


def in_threads(work: Callable[[int], Any], count: int) -> list[Any]:
    """The results of `work(0)`, `work(1)`, ... run at once; raises the first error."""
    results: list[Any] = [None] * count
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            results[index] = work(index)
        except BaseException as error:  # noqa: BLE001 - raised below, in the test's thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]
    return results


def train_crew(
    clients: Callable[[], Any],
    count: int,
    steps: int,
    *,
    lr: float = 0.1,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> list[tuple[dict[str, Tensor], dict[str, float]]]:
    """The parameters and metrics of each worker after `steps` steps; each starts from a model of its own."""

    def work(index: int) -> tuple[dict[str, Tensor], dict[str, float]]:
        model = small_model(seed=index + 1, dtype=dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        name = f"worker-{index}"
        with DiLoCoWorker(model, optimizer, "", worker_id=name, client=clients(), timeout=20, **options) as worker:
            train(model, optimizer, batches(index, steps, dtype))
            return values(model), worker.sync_metrics

    return in_threads(work, count)


def new_worker(server: LocalServer, name: str = "w", **options: Any) -> tuple[Any, torch.optim.SGD, DiLoCoWorker]:
    model = small_model(seed=9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"timeout": 10, "heartbeat_interval": 0.0, "max_sync_retries": 0} | options
    return model, optimizer, DiLoCoWorker(model, optimizer, "", worker_id=name, client=server, **options)


def local_worker(
    settings: Settings = ALONE, name: str = "w", **options: Any
) -> tuple[LocalServer, Any, torch.optim.SGD, DiLoCoWorker]:
    """A server without sockets, and a worker of it that has not started, with its model and optimizer."""
    server = LocalServer(values(small_model()), settings)
    return server, *new_worker(server, name, **options)


def trained_alone(steps: int) -> dict[str, Tensor]:
    model = small_model()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), batches(0, steps))
    return values(model)


def assert_close(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    for name, value in other.items():
        torch.testing.assert_close(one[name], value, rtol=0, atol=tolerance)


def sgd(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


def nesterov(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.6, nesterov=True)


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


def outer_steps(count: int, every: int, rounds: int) -> dict[str, Tensor]:
    """Nesterov of torch on the average of the differences that `count` models make in rounds of `every` steps."""
    outer = small_model()
    optimizer = nesterov(list(outer.parameters()))
    for index in range(rounds):
        ends = [_end(outer, worker, index * every, every, every * rounds) for worker in range(count)]
        for name, parameter in outer.named_parameters():
            parameter.grad = torch.stack([parameter.detach() - end[name] for end in ends]).mean(0)
        optimizer.step()
    return values(outer)


def _end(outer: nn.Module, worker: int, start: int, steps: int, total: int) -> dict[str, Tensor]:
    model = small_model()
    model.load_state_dict(outer.state_dict())
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), batches(worker, total)[start : start + steps])
    return values(model)


def saved(worker: DiLoCoWorker) -> Any:
    """The state, through the format of checkpoints."""
    tensors, document = encode_state(worker.state_dict())
    return decode_state({name: tensor.clone() for name, tensor in tensors.items()}, document)
