"""What each rank of the tests of exchanged and checked gradients runs."""

from __future__ import annotations

import math
import os
from contextlib import closing
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onstep import Callback, Trainer, TrainingArguments, pretrain
from onstep.config import ConfigContainer, DistributedDataParallelConfig, DistributedInitConfig
from onstep.distributed import data_parallel, open_world
from onstep.errors import OnstepError
from tests.support.jobs.rank_jobs import Regression, TinyModel, config

RANK = int(os.environ.get("RANK", "0"))


def local_gradients(dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
    """A model that is the same on every rank, and its gradient (64, 64) of this rank's samples."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64, bias=False).to(dtype)
    samples = torch.randn(16, 64, generator=torch.Generator().manual_seed(1 + RANK)).to(dtype)
    model(samples).square().mean().backward()
    gradient = model.weight.grad
    model.zero_grad()
    return model, gradient


def averaged(dtype: torch.dtype, **options: Any) -> Tensor:
    world = open_world(DistributedInitConfig(device="cpu"))
    model, _ = local_gradients(dtype)
    [wrapped] = data_parallel([model], world, DistributedDataParallelConfig(**options))
    samples = torch.randn(16, 64, generator=torch.Generator().manual_seed(1 + RANK)).to(dtype)
    wrapped(samples).square().mean().backward()
    gradient = model.weight.grad
    assert isinstance(gradient, Tensor)
    return gradient.clone()


def job_averages(settings: dict[str, Any]) -> dict[str, Any]:
    """How gradients of bfloat16 are averaged, and whether checks and float32 change what is float32."""
    with closing(open_world(DistributedInitConfig(device="cpu"))) as world:
        _, mine = local_gradients(torch.bfloat16)
        parts = [torch.empty_like(mine) for _ in range(world.size)]
        dist.all_gather(parts, mine)
        exact = torch.stack([part.double() for part in parts]).mean(0)
        low = {key: averaged(torch.bfloat16, grad_reduce_in_fp32=key).double() for key in (False, True)}
        # bfloat16 rounds by 2 ** -9 at most; float32 rounds what nearly cancels
        known = {key: bool(((one - exact).abs() <= exact.abs() * 2**-8 + 1e-9).all()) for key, one in low.items()}
        checks = {"check_for_nan_in_grad": True, "check_for_large_grads": True, "grad_reduce_in_fp32": True}
        plain, checked = averaged(torch.float32), averaged(torch.float32, **checks)
        return {
            "rounded once": [known[False], known[True]],
            "float32 has the same bits": torch.equal(plain, checked),
        }


class Spoils(Callback):
    """Multiplies the gradient of a parameter of rank 1 by a factor, at one step, and keeps the weights before it."""

    def __init__(self, name: str, step: int, factor: float) -> None:
        self.name, self.step, self.factor, self.now = name, step, factor, 0
        self.weights = self.end = 0.0

    def on_train_start(self, context: Any) -> None:
        parameter = dict(context.model[0].named_parameters())[self.name]
        is_bad_rank = int(os.environ.get("WORLD_SIZE", "1")) - 1 == RANK
        parameter.register_hook(lambda grad: grad * self.factor if self.now == self.step and is_bad_rank else grad)

    def on_train_step_start(self, context: Any) -> None:
        self.now, self.weights = self.now + 1, total(context.model[0])

    def on_exception(self, context: Any) -> None:
        self.end = total(context.model[0])


def total(model: nn.Module) -> float:
    return sum(parameter.double().abs().sum().item() for parameter in model.parameters())


def job_checked(settings: dict[str, Any]) -> dict[str, Any]:
    """The errors of both doors; in the second of the two steps, or beyond the first hundred."""
    kinds: dict[str, Any] = {}
    for kind, step, factor in (("nan", 2, math.nan), ("large", 102, 1e6)):
        key = {"nan": "ddp.check_for_nan_in_grad", "large": "ddp.check_for_large_grads"}[kind]
        more = settings.get("keys", {})
        doors = [through_trainer] if kind == "large" or more else [through_trainer, through_pretrain]
        for door in doors:
            prefix = "module." if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
            name = {through_trainer: "out.weight", through_pretrain: "final_norm.weight"}[door]
            spoils = Spoils(prefix + name, step, factor)
            try:
                door(spoils, {key: settings.get("checks", True), **more}, step + 1, settings)
                error = "none"
            except OnstepError as raised:
                error = f"{type(raised).__name__}: {raised}"
            kinds[f"{kind} {door.__name__}"] = {"error": error, "same": spoils.weights == spoils.end}
    return kinds


def through_trainer(spoils: Spoils, keys: dict[str, Any], steps: int, settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    args = TrainingArguments(
        output_dir="run",
        per_device_train_batch_size=1,
        max_steps=steps,
        learning_rate=1e-4,
        use_cpu=True,
        save_strategy="no",
        config_overrides=keys,
    )
    Trainer(TinyModel(), args, train_dataset=Regression(), callbacks=[spoils], default_callbacks=False).train()


def through_pretrain(spoils: Spoils, keys: dict[str, Any], steps: int, settings: dict[str, Any]) -> None:
    small: ConfigContainer = config(settings)
    small.train.train_iters = steps
    for key, value in keys.items():
        setattr(small.ddp, key.removeprefix("ddp."), value)
    pretrain(small, callbacks=[spoils])
