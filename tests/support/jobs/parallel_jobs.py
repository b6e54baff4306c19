"""What each rank of the tests of parallel sizes runs."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from onstep import Callback, Trainer, TrainingArguments, pretrain
from onstep.config import ConfigContainer
from onstep.distributed import World
from onstep.errors import ConfigError
from onstep.training import GlobalState, train
from tests.support.jobs.rank_jobs import Regression, TinyModel, config


class Sizes(Callback):
    """Notes the sizes of the axes, and how many ranks have samples of their own."""

    def __init__(self) -> None:
        self.found: list[int] = []

    def on_train_start(self, context: Any) -> None:
        world = context.state.world
        self.found = [world.sizes.dp_replicate, world.sizes.dp_shard, world.data.size]


def through_pretrain(settings: dict[str, Any]) -> list[int]:
    small, sizes = config(settings), Sizes()
    small.train.train_iters, small.validation.eval_iters = 1, 0
    small.train.global_batch_size = None
    for name, value in settings["parallel"].items():
        setattr(small.parallel, name, value)
    pretrain(small, callbacks=[sizes])
    return sizes.found


def through_trainer(settings: dict[str, Any]) -> list[int]:
    keys = {f"parallel.{name}": value for name, value in settings["parallel"].items()}
    args = TrainingArguments(
        output_dir="run", per_device_train_batch_size=2, max_steps=1, use_cpu=True, config_overrides=keys
    )
    sizes = Sizes()
    torch.manual_seed(0)
    Trainer(TinyModel(), args, train_dataset=Regression(), callbacks=[sizes], default_callbacks=False).train()
    return sizes.found


def through_train(settings: dict[str, Any]) -> list[int]:
    by_hand = ConfigContainer()
    by_hand.train.train_iters, by_hand.train.micro_batch_size = 1, 2
    for name, value in settings["parallel"].items():
        setattr(by_hand.parallel, name, value)
    model, data = nn.Linear(2, 2), iter([torch.ones(1, 2)] * 2)
    state = GlobalState(by_hand, world=World(), num_microbatches=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(lambda data, model: model(next(data)).sum(), [model], optimizer, None, data, None, state)  # type: ignore[arg-type]
    return []


class Block(nn.Module):
    def __init__(self, weight: nn.Parameter | None = None) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        if weight is not None:
            self.inner.weight = weight


class Undivided(nn.Module):
    """A model that cannot be divided, for a reason; it is never called."""

    def __init__(self, reason: str) -> None:
        super().__init__()
        shared = nn.Parameter(torch.ones(8, 8)) if reason == "shared" else None
        blocks = [Block(shared), Block(shared)]
        self.layers = nn.Sequential(*blocks) if reason == "no blocks" else nn.ModuleList(blocks)


class Closing(torch.optim.SGD):
    """An optimizer that computes the loss again."""

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return super().step(closure)


def job_undivided(settings: dict[str, Any]) -> dict[str, Any]:
    """What is said to a model or an optimizer that cannot be divided, and whether the ranks had met by then."""
    sys.modules.pop("accelerate.state", None)
    found: dict[str, Any] = {}
    for reason in settings["reasons"]:
        model, options, optimizer = Undivided(reason), {}, None
        if reason == "float16":
            model, options = model.half(), {"fp16": True}
        if reason == "quantized":
            packed = nn.Parameter(torch.ones(4, dtype=torch.uint8), requires_grad=False)
            model.layers[0].register_parameter("packed", packed)
        if reason == "scalar":
            model.layers[0].register_parameter("scale", nn.Parameter(torch.ones(())))
        if reason == "class":
            options = {"fsdp_config": {"transformer_layer_cls_to_wrap": "Blok"}}
        if kind := {"LBFGS": torch.optim.LBFGS, "closure": Closing, "whole": torch.optim.SGD}.get(reason):
            optimizer = kind(model.parameters(), lr=0.1)
        args = TrainingArguments(output_dir="run", max_steps=1, use_cpu=True, fsdp="full_shard", **options)
        try:
            Trainer(model, args, train_dataset=Regression(), optimizers=(optimizer, None)).train()
        except ConfigError as error:
            found[reason] = [str(error), dist.is_initialized()]
    small = config(settings)
    small.parallel.data_parallel_shard_size, small.fsdp.wrap = -1, ["Layr"]
    try:
        pretrain(small)
    except ConfigError as error:
        found["configured class"] = [str(error), dist.is_initialized()]
    return found


def job_sizes(settings: dict[str, Any]) -> dict[str, Any]:
    """The sizes of each way to train, or its error and whether there was a process group by then."""
    # which the server may have imported: TrainingArguments then join the group, as those of transformers do
    sys.modules.pop("accelerate.state", None)
    found: dict[str, Any] = {}
    for way in (through_pretrain, through_trainer, through_train)[: settings["ways"]]:
        try:
            found[way.__name__] = way(settings)
        except ConfigError as error:
            found[way.__name__] = [str(error), dist.is_initialized()]
    return found
