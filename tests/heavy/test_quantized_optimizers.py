"""Optimizers of bitsandbytes and torchao are stored without pickle, continue exactly, and pass through the gate."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from onstep.checkpoint.format.codec import encode_state
from onstep.checkpoint.format.decoding import decode_state
from onstep.config import OptimizerConfig
from onstep.config.sections.optimizer import OF_PACKAGES
from onstep.errors import ConfigError
from onstep.optim import TrainingOptimizer, build_optimizer
from onstep.training.checkpointing.optimizer_state import OptimizerState

pytestmark = pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU:UserWarning")


@pytest.fixture(autouse=True)
def uncompiled() -> Iterator[None]:
    """torchao compiles its step, which takes longer than all of these tests."""
    with torch.compiler.set_stance("force_eager"):
        yield


def made(name: str) -> tuple[nn.Module, TrainingOptimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 64), nn.Linear(64, 2))
    return model, build_optimizer([model], OptimizerConfig(optimizer=name, lr=1e-2, clip_grad=0.5))


def train(model: nn.Module, optimizer: TrainingOptimizer, seeds: range, scale: float = 1.0) -> list[float]:
    losses = []
    for seed in seeds:
        x = torch.randn(8, 128, generator=torch.Generator().manual_seed(seed))
        loss = (model(x) - 1).square().sum() * scale
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", OF_PACKAGES)
def test_a_stored_state_continues_exactly_and_a_bad_step_changes_nothing(name: str) -> None:
    model, optimizer = made(name)
    assert train(model, optimizer, range(6))[-1] < train(*made(name), range(1))[0]
    again, other = made(name)
    train(again, other, range(3))
    tensors, document = encode_state(OptimizerState(other, [again]).state_dict())
    assert {type(one) for one in tensors.values()} <= {torch.Tensor}
    assert name.endswith("32bit") or name in ("ademamix",) or any(one.dtype is torch.uint8 for one in tensors.values())
    fresh, continued = made(name)
    fresh.load_state_dict(again.state_dict())
    state = decode_state({key: one.clone() for key, one in tensors.items()}, document, "state")
    OptimizerState(continued, [fresh]).load_state_dict(state)
    train(fresh, continued, range(3, 6))
    for one, expected in zip(fresh.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, expected)
    train(fresh, continued, range(6, 7), scale=float("nan"))
    for one, expected in zip(fresh.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, expected)


@pytest.mark.parametrize("name", ["adamw_8bit", "adamw_torch_8bit"])
def test_parameters_in_shards_are_refused(name: str) -> None:
    kind = type(made(name)[1].optimizer)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = fully_shard(nn.Linear(128, 64), mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(ConfigError, match=f"{kind.__name__} of .* has quantized state"):
            TrainingOptimizer(kind(model.parameters()))
    finally:
        dist.destroy_process_group()
