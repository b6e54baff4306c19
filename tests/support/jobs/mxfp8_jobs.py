"""What the ranks of the tests of parameters in MXFP8 run: `job_*(settings)`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onstep.config import DistributedDataParallelConfig, DistributedInitConfig
from onstep.distributed import open_world
from onstep.distributed.buffered import BufferedDataParallel, buffered_data_parallel
from onstep.distributed.mxfp8 import rounded
from onstep.distributed.shards import whole
from onstep.errors import ConfigError
from onstep.optim.distributed_optimizer import DistributedOptimizer

ROWS, STEPS = 12, 5


def made() -> nn.Sequential:
    """Rows that no number of ranks divides, fewer than ranks, of one block of 32, of a part of one, and of several."""
    torch.manual_seed(0)
    last = nn.Linear(32, 5), nn.Linear(5, 1)
    return nn.Sequential(nn.Linear(3, 37), nn.Tanh(), nn.Linear(37, 32), nn.LayerNorm(32), *last)


def batch(step: int) -> Tensor:
    return torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
    return (model(inputs) - inputs[:, :1]).square().sum()


def blockwise(weight: Tensor) -> Tensor:
    """What is left of a matrix whose rows are quantized one by one."""
    return torch.stack([rounded(row) for row in weight]) if weight.ndim > 1 else weight


def job_by_hand(settings: dict[str, Any]) -> dict[str, Any]:
    """Plain torch: masters are updated by the gradients of a model that has them rounded."""
    model, masters = made(), [nn.Parameter(one.detach().clone()) for one in made().parameters()]
    optimizer, losses = torch.optim.AdamW(masters, lr=1e-2), []
    for step in range(STEPS):
        with torch.no_grad():
            for one, master in zip(model.parameters(), masters, strict=True):
                one.copy_(blockwise(master))
        loss = loss_of(model, batch(step))
        loss.backward()
        for one, master in zip(model.parameters(), masters, strict=True):
            master.grad, one.grad = one.grad, None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "masters": [one.flatten().tolist() for one in masters]}


def opened(settings: dict[str, Any]) -> tuple[Any, BufferedDataParallel, DistributedOptimizer]:
    world = open_world(DistributedInitConfig(device="cpu"))
    flags = dict.fromkeys(settings.get("flags", []), True)
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=True, fp8_param_gather=True, bucket_cap_mb=settings.get("megabytes", 1e-5), **flags
    )
    [model] = buffered_data_parallel([made()], world, ddp)
    assert isinstance(model, BufferedDataParallel)
    return world, model, DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), [model])


def job_steps(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Of each run: losses and masters of clipped steps with Megatron's calls, and what was gathered."""
    return [_steps(one) for one in settings["runs"]]


def _steps(settings: dict[str, Any]) -> dict[str, Any]:
    world, model, optimizer = opened(settings)
    overlaps = model.ddp_config.overlap_param_gather
    losses, gathered, grads = [], 0, []
    gather = getattr(dist, _GATHER)

    def counted(filled: Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal gathered
        gathered += filled.nbytes
        return gather(filled, *args, **kwargs)

    setattr(dist, _GATHER, counted)
    for step in range(STEPS):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        optimizer._copy_main_params_to_param_buffer()
        loss = loss_of(model, batch(step).chunk(world.size)[world.rank])
        loss.backward()
        sent = loss.detach().clone()
        dist.all_reduce(sent)
        losses.append(sent.item())
        grads.append(sum(float(one.gradient.double().abs().sum()) for one in model.members))
        optimizer.step()
        if step == 0 and overlaps:
            model.enable_forward_pre_hook()
        if step == 2 and overlaps:
            optimizer.prepare_model_params_for_param_sync()
            model.disable_forward_pre_hook()
            model.enable_forward_pre_hook()
    model.start_param_sync(force_sync=True)
    setattr(dist, _GATHER, gather)
    masters = [whole(model.masters[id(one)].detach()) for one in model.parameters()]
    found = {
        "losses": losses,
        "gathered": gathered / STEPS,
        "grads": grads,
        "is_rounded": [torch.equal(blockwise(a), b) for a, b in zip(masters, model.parameters(), strict=True)],
        "masters": [one.flatten().tolist() for one in masters],
        "clean": all(not flat.any() for flat in model._gradients) if settings.get("flags") else None,
        "own": sum(one.to_local().nbytes for one in model.masters.values()),
    }
    world.close()
    return found


_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


def job_written(settings: dict[str, Any]) -> list[Any]:
    """The master of a parameter that is written to before a forward pass, before and in an update, and by a load."""
    world, model, optimizer = opened(settings)
    first = next(model.parameters())
    master = model.masters[id(first)]
    found: list[Any] = []
    with torch.no_grad():
        first.fill_(0.3)
    model(batch(0))
    found.append([float(whole(master.detach()).mean()), float(first.detach().mean())])
    loss_of(model, batch(0)).backward()
    with torch.no_grad():
        first.fill_(0.7)
    optimizer.step()
    found.append([round(float(whole(master.detach()).mean()), 1)])
    loss_of(model, batch(0)).backward()
    optimizer.prepare()
    with torch.no_grad():
        first.fill_(0.4)
    optimizer.apply()
    found.append([round(float(whole(master.detach()).mean()), 1)])
    model.module.load_state_dict(made().state_dict())
    model(batch(0))
    found.append([torch.equal(whole(master.detach()), next(made().parameters()))])
    world.close()
    return found


def job_refused(settings: dict[str, Any]) -> str:
    """What a bfloat16 model says."""
    world = open_world(DistributedInitConfig(device="cpu"))
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, fp8_param_gather=True)
    try:
        buffered_data_parallel([made().bfloat16()], world, ddp)
    except ConfigError as error:
        return str(error)
    finally:
        world.close()
    return "nothing"


def job_early(settings: dict[str, Any]) -> str:
    """What a gradient says that arrives while its memory is that of a gather."""
    world, model, optimizer = opened(settings)
    loss_of(model, batch(0)).backward()
    optimizer.step()
    model.enable_forward_pre_hook()
    loss_of(model, batch(0)).backward()
    optimizer.step()
    model.zero_grad_buffer()
    try:
        sum(one.square().sum() for one in model.parameters()).backward()
    except ConfigError as error:
        return str(error)
    finally:
        model.finish_param_sync()
        world.close()
    return "nothing"
