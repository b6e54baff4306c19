"""What the ranks of the tests of layouts run: `job_*(settings)`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from onstep.optim.fused_step import FusedStep

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from layout_names import LAYOUTS, VARIANTS
from layout_rows import run_row


def job_rows(settings: dict[str, Any]) -> list[Any]:
    """Variants of one layout, one after the other; their weights are in `<number>.pt`."""
    return [
        run_row(
            LAYOUTS[settings["layout"]], replace(VARIANTS[name], **more), settings["steps"], parameters=f"{number}.pt"
        )
        for number, (name, more) in enumerate(settings["variants"])
    ]


def job_muon(settings: dict[str, Any]) -> list[bool]:
    """Whether matrices in shards have the bits of whole ones after three steps of Muon, one of them with a new rate."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", tuple(settings["mesh"]))
    placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
    generator = torch.Generator().manual_seed(0)
    shapes = [(7, 5), (2, 6), (8, 8), (1, 4), (12, 3)]
    whole = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    divided = [torch.nn.Parameter(distribute_tensor(one.detach().clone(), mesh, placements)) for one in whole]
    options = {"lr": 0.1, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    optimizers = [torch.optim.Muon(ones, **options) for ones in (whole, divided)]
    for number in range(3):
        for one, other in zip(whole, divided, strict=True):
            one.grad = torch.randn(one.shape, generator=generator)
            other.grad = distribute_tensor(one.grad.clone(), mesh, placements)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)
            FusedStep(optimizer)()
    return [torch.equal(one, other.full_tensor()) for one, other in zip(whole, divided, strict=True)]
