"""Makes this process the rank that a `distributed_env` of Forgather names."""

from __future__ import annotations

import copy
import os

import torch
import torch.distributed as dist

from onstep.config import TrainingArguments
from onstep.errors import ConfigError

_VARIABLES = {
    "rank": "RANK",
    "world_size": "WORLD_SIZE",
    "local_rank": "LOCAL_RANK",
    "local_world_size": "LOCAL_WORLD_SIZE",
    "master_addr": "MASTER_ADDR",
    "master_port": "MASTER_PORT",
}


def join_environment(env: object, args: TrainingArguments) -> TrainingArguments:
    """Train as the rank that `env` names; returns the arguments, with its device.

    Its ranks become the environment variables of torchrun, where these are not set.

    Raises:
        ConfigError: if it lacks a rank or a world size, or names others than the environment or the process group.
    """
    facts = {name: getattr(env, name, None) for name in _VARIABLES}
    rank, size = facts["rank"], facts["world_size"]
    if not isinstance(rank, int) or not isinstance(size, int) or not 0 <= rank < size:
        raise ConfigError(
            f"distributed_env must have a rank of 0 to world_size - 1 and a world_size, got rank={rank!r} and "
            f"world_size={size!r}; leave it out for the processes that torchrun starts"
        )
    if dist.is_available() and dist.is_initialized():
        _check("the process group", {"rank": dist.get_rank(), "world_size": dist.get_world_size()}, facts)
    else:
        given = {name: os.environ[variable] for name, variable in _VARIABLES.items() if variable in os.environ}
        ours = {name: int(given[name]) for name in ("rank", "world_size", "local_rank") if given.get(name)}
        _check("the environment", {"rank": 0, "world_size": 1, **ours} if given or size == 1 else ours, facts)
        if size > 1:
            _set_variables(facts)
    return _on_device(getattr(env, "device", None), args)


def _check(where: str, ours: dict[str, int], facts: dict[str, object]) -> None:
    for name, value in ours.items():
        if facts[name] is not None and facts[name] != value:
            raise ConfigError(
                f"distributed_env has {name}={facts[name]}, but {where} has {value}; make it of the same processes, or "
                f"leave it out"
            )


def _set_variables(facts: dict[str, object]) -> None:
    facts = {**facts, "local_rank": facts["rank"] if facts["local_rank"] is None else facts["local_rank"]}
    facts["local_world_size"] = facts["local_world_size"] or facts["world_size"]
    missing = [
        name for name in ("master_addr", "master_port") if not facts[name] and _VARIABLES[name] not in os.environ
    ]
    if missing:
        raise ConfigError(
            f"distributed_env has {facts['world_size']} ranks and no {' and '.join(missing)}; set them, or start the "
            f"script with torchrun"
        )
    for name, value in facts.items():
        if value is not None:
            os.environ.setdefault(_VARIABLES[name], str(value))


def _on_device(device: object, args: TrainingArguments) -> TrainingArguments:
    """The arguments of a training on the device, if it is not the one of the arguments."""
    if device is None or not torch.cuda.is_available():
        return args
    wanted, ours = torch.device(str(device)), args.device
    if wanted.type == "cpu" and ours.type != "cpu":
        args = copy.copy(args)
        args.use_cpu = True
    elif wanted.type != ours.type or (wanted.index is not None and wanted.index != ours.index):
        raise ConfigError(
            f"distributed_env has device={wanted}, but local rank {args.local_process_index} trains on {ours}; choose "
            f"GPUs with CUDA_VISIBLE_DEVICES"
        )
    return args
