"""What the ranks of the tests of layouts run: `job_*(settings)`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.functional import cross_entropy

from onstep.distributed import fully_sharded
from onstep.distributed.shards import whole
from onstep.optim import LowPrecisionOptimizer
from onstep.optim.fused_step import FusedStep
from onstep.optim.rounding import join_remainder
from onstep.optim.sharded_muon import Float32Muon

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from layout_names import LAYOUTS, ROWS, VARIANTS
from layout_rows import LEARNING_RATE, Rows, config_of, model_of, run_row


def job_rows(settings: dict[str, Any]) -> list[Any]:
    """Variants of a layout, or of others of as many ranks, one after the other; their weights are in `<number>.pt`.

    Without `along`, a file of weights for the starts of steps, those of one process go to `<number>-starts.pt`.
    """
    found, along = [], settings.get("along")
    for number, (name, more) in enumerate(settings["variants"]):
        layout = LAYOUTS[more.pop("layout", settings["layout"])]
        found.append(
            run_row(
                layout,
                replace(VARIANTS[name], **more),
                settings["steps"],
                parameters=f"{number}.pt",
                starts=f"{number}-starts.pt" if layout.ranks == 1 else None,
                along=along,
            )
        )
    return found


def job_beside(settings: dict[str, Any]) -> list[Any]:
    """Losses, norms, and whether gathers and scatters were left to run: ours, and torch's, which awaits them all."""
    found = []
    names = [name for name in ("all_gather_single", "reduce_scatter_single") if hasattr(dist, name)]
    for names_replaced in ([], ["gather_beside", "scatter_beside"]):
        with pytest.MonkeyPatch.context() as patch:
            for name in names_replaced:
                patch.setattr(fully_sharded, name, lambda modules: None)
            later: dict[str, list[bool]] = {name: [] for name in names}
            for name in names:
                patch.setattr(dist, name, _noting(getattr(dist, name), later[name]))
            row = run_row(LAYOUTS["fsdp2 prefetch"], replace(VARIANTS["accumulated"], accumulation=2), 3)
        found.append((row["losses"], row["norms"], [sorted(set(kinds)) for kinds in later.values()]))
    return found


def _noting(collective: Callable[..., Any], later: list[bool]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        later.append(kwargs["async_op"])
        return collective(*args, **kwargs)

    return call


def job_of_one(settings: dict[str, Any]) -> list[Any]:
    """The plain variant with nothing but torch, and in shards on one rank; their weights are in `0.pt` and `1.pt`."""
    by_hand = _by_hand(settings["steps"])
    return [by_hand, run_row(LAYOUTS["fsdp1"], VARIANTS["plain"], settings["steps"], parameters="1.pt")]


def _by_hand(steps: int) -> dict[str, Any]:
    variant, losses, norms = VARIANTS["plain"], [], []
    model = model_of(variant, config_of(LAYOUTS["one"], variant, steps))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    samples = Rows(variant.has_empty_rank)
    for step in range(steps):
        batch = [samples[index] for index in range(step * ROWS, (step + 1) * ROWS)]
        tokens, labels = (torch.stack([one[key] for one in batch]) for key in ("tokens", "labels"))
        scores = model(tokens).flatten(0, 1)
        loss = cross_entropy(scores, labels.flatten(), reduction="sum") / labels.ne(-100).sum()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    torch.save(dict(model.named_parameters()), "0.pt")
    return {"losses": losses, "norms": norms}


def job_muon(settings: dict[str, Any]) -> list[bool]:
    """Whether matrices in shards have the bits of whole ones after three steps of Muon, one of them with a new rate."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", tuple(settings["mesh"]))
    ways = [[Shard(0)], [Shard(1)]]
    if mesh.ndim > 1:
        ways = [
            [Replicate(), *ways[0]],
            [Shard(0), Shard(1)],
            [Shard(1), Shard(0)],
            [_StridedShard(0, split_factor=2), Shard(0)],
        ]
    return [is_equal for placements in ways for is_equal in _muon(settings, mesh, placements)]


def _muon(settings: dict[str, Any], mesh: DeviceMesh, placements: list[Any]) -> list[bool]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(7, 5), (2, 6), (8, 8), (1, 4), (12, 3)][: settings["matrices"]]
    if len(set(map(type, placements))) > 1 and Replicate() not in placements:
        shapes = [(8, 5), (4, 6), (12, 3)]  # torch requires multiples there
    whole = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    divided = [torch.nn.Parameter(distribute_tensor(one.detach().clone(), mesh, placements)) for one in whole]
    options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    kind = Float32Muon if settings["precise"] else torch.optim.Muon
    optimizers = [kind(ones, **options) for ones in (whole, divided)]
    seen: list[int] = []
    if settings["hooked"]:
        optimizers[1].register_step_pre_hook(lambda *given: seen.append(0))
        optimizers[1].register_step_post_hook(lambda *given: seen.append(1))
    for number in range(3):
        for one, other in zip(whole, divided, strict=True):
            one.grad = torch.randn(one.shape, generator=generator)
            other.grad = distribute_tensor(one.grad.clone(), mesh, placements)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)
            FusedStep(optimizer)()
    assert seen == [0, 1] * 3 * settings["hooked"]
    return [torch.equal(one, other.full_tensor()) for one, other in zip(whole, divided, strict=True)]


def job_master_weights(settings: dict[str, Any]) -> float:
    """How far bfloat16 weights in shards are from whole ones after each of three steps, with all of their state.

    The optimizer of the shards is loaded anew after each step.
    """
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", tuple(settings["mesh"]))
    placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
    generator = torch.Generator().manual_seed(0)
    shapes: list[tuple[int, ...]] = [(7, 5), (2, 6), (1, 4)]
    if settings["optimizer"] != "muon":
        shapes.append((9,))
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator).bfloat16()) for shape in shapes]
    divided = [torch.nn.Parameter(distribute_tensor(one.detach().clone(), mesh, placements)) for one in params]

    def made(params: list[torch.nn.Parameter]) -> LowPrecisionOptimizer:
        if settings["optimizer"] == "sgd":
            return LowPrecisionOptimizer([torch.optim.SGD(params, lr=0.1, momentum=0.9)])
        if settings["optimizer"] == "muon":
            return LowPrecisionOptimizer([Float32Muon(params, lr=0.1)])
        return LowPrecisionOptimizer([torch.optim.AdamW(params, lr=0.1)])

    def held(optimizer: LowPrecisionOptimizer) -> list[Tensor]:
        found = []
        for param in optimizer.param_groups[0]["params"]:
            state = {key: whole(one.double()) for key, one in optimizer.state[param].items()}  # gloo gathers no int16
            master = whole(param.detach()).float()
            join_remainder(master, state.pop("remainder").int())
            found += [master.double(), *state.values()]
        return found

    optimizers, most = [made(params), made(divided)], 0.0
    for _ in range(3):
        for one, other in zip(params, divided, strict=True):
            one.grad = torch.randn(one.shape, generator=generator).bfloat16()
            other.grad = distribute_tensor(one.grad.clone(), mesh, placements)
        for optimizer in optimizers:
            optimizer.step()
        pairs = zip(*map(held, optimizers), strict=True)
        most = max(most, *(float((one - other).abs().max()) for one, other in pairs))
        state = optimizers[1].state_dict()
        optimizers[1] = made(divided)
        optimizers[1].load_state_dict(state)
    return most
