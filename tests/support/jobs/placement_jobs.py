"""What each rank gets of a model that is built without values, divided, and then filled: `job_*(settings)`."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import torch
from torch import nn

from onstep.config import ConfigContainer, DistributedInitConfig, from_dict
from onstep.distributed import ParallelSizes, World, open_world
from onstep.distributed.shards import as_dtensor, whole
from onstep.errors import OnstepError
from onstep.training import GlobalState
from onstep.training.setup.model_and_data import build_model
from onstep.training.setup.pretrained import fill_from_pretrained


def built(config: ConfigContainer, world: World, hooks: Any = ()) -> nn.Module:
    """The model of a run of this world."""
    return build_model(config, world, GlobalState(config, world=world), hooks)[0]


def shrink(chunks: list[nn.Module]) -> None:
    """A hook that changes weights, adds some, and freezes some."""
    (chunk,) = chunks
    for parameter in chunk.parameters():
        parameter.data.mul_(0.5)
    chunk.output = nn.Linear(16, 67, bias=False)
    chunk.embedding.weight.requires_grad_(False)


def job_refusal(settings: dict[str, Any]) -> str:
    """The error of a build."""
    sizes = ParallelSizes(**settings["sizes"])
    with closing(open_world(DistributedInitConfig(device="cpu"), sizes)) as world:
        config = from_dict(settings["values"] | settings.get(f"of_rank_{world.rank}", {}))
        config.parallel.data_parallel_shard_size = sizes.dp_shard
        try:
            built(config, world)
        except OnstepError as error:
            return str(error)
    return ""


def job_compare(settings: dict[str, Any]) -> dict[str, Any]:
    """How the divided model of each configuration differs from that of one process."""
    found, sizes = {}, ParallelSizes(**settings["sizes"])
    with closing(open_world(DistributedInitConfig(device="cpu"), sizes)) as world:
        for name, values in settings["cases"].items():
            config = from_dict(values)
            if config.checkpoint.pretrained_checkpoint is not None:
                config = fill_from_pretrained(config)
            hooks = [shrink] if settings.get("has_hook") else []
            one = built(config, World(), hooks)
            config.parallel.data_parallel_shard_size = sizes.dp_shard
            divided = built(config, world, hooks)
            found[name] = differences(one, divided)
    return found


def differences(one: nn.Module, divided: nn.Module) -> list[str]:
    """What differs between two models, in words; nothing if the second one is the first in shards."""
    found = []
    parameters = dict(divided.named_parameters(remove_duplicate=False))
    expected = dict(one.named_parameters(remove_duplicate=False))
    if list(parameters) != list(expected):
        found.append(f"names: {sorted(set(parameters) ^ set(expected))}")
    for name, parameter in expected.items():
        other = parameters[name]
        if as_dtensor(other) is None:
            found.append(f"{name} is not divided")
        if other.dtype != parameter.dtype or other.requires_grad != parameter.requires_grad:
            found.append(f"{name} has {other.dtype}, {other.requires_grad}")
        if not torch.equal(whole(other.detach()), parameter.detach()):
            found.append(f"{name} has other values")
    for names in ties(one):
        if len({id(parameters[name]) for name in names}) != 1:
            found.append(f"{names} are not shared")
    buffers = dict(divided.named_buffers())
    found += [name for name, one in one.named_buffers() if not torch.equal(one, buffers[name])]
    tokens = torch.arange(24).view(2, 12)
    torch.manual_seed(0)
    expected_logits = one(tokens)
    torch.manual_seed(0)
    if not torch.equal(divided(tokens).detach(), expected_logits.detach()):
        found.append("logits")
    return found


def ties(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]
