"""What each rank finds in the process groups of a run: `job_*(settings)`."""

from __future__ import annotations

import itertools
import os
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial

from onstep.config import ConfigContainer, DistributedInitConfig
from onstep.distributed import ParallelSizes, data_parallel, open_world
from onstep.distributed.shards import as_dtensor
from onstep.errors import ConfigError, ShardingError
from onstep.metrics import (
    calc_dtensor_params_l2_norm,
    calc_params_l2_norm,
    logical_and_across_model_parallel_group,
    reduce_max_memory_across_pp_group,
    reduce_max_stat_across_model_parallel_group,
)
from onstep.training import GlobalState, evaluate, train
from onstep.training.model_parallel.agreement import model_parallel_group
from tests.support.jobs.pipeline_jobs import STEPS, Ragged, config_of, divided
from tests.support.jobs.world_jobs import num_groups
from tests.support.small_runs import RaggedRows, TinyModel, mean_step, split

NAMES = ["tp", "pp", "cp", "dp", "dp_cp", "mp", "ep", "expt_tp", "expt_dp", "tp_ep_pp", "tp_dp_cp", "embd", "pos_embd"]


def job_groups(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The ranks of each group of each layout, and what functions that take a group give over them."""
    config = DistributedInitConfig(device="cpu")
    found = []
    with closing(open_world(config)):
        dist.new_group([0])  # of a user, so that ranks have made different numbers of groups
        for sizes in settings["layouts"]:
            earlier = num_groups()
            with closing(open_world(config, ParallelSizes(**sizes))) as world:
                groups = GlobalState(ConfigContainer(), world=world).pg_collection
                before, ranks = num_groups() - earlier, {}
                for name in NAMES:
                    group = getattr(groups, name)
                    if group is None:
                        ranks[name] = None
                        continue
                    total = torch.tensor([world.rank])
                    dist.all_reduce(total, group=group)
                    ranks[name] = dist.get_process_group_ranks(group)
                    assert getattr(groups, name) is group, "made once"
                    assert (group.size(), group.rank()) == (len(ranks[name]), ranks[name].index(world.rank))
                    assert total.item() == sum(ranks[name])
                model = TinyModel()
                shared = model_parallel_group([model], world)
                found.append(
                    {
                        "ranks": ranks,
                        "before": before,
                        "largest": reduce_max_stat_across_model_parallel_group(float(world.rank), groups.mp),
                        "all_but_0": logical_and_across_model_parallel_group(world.rank != 0, groups.mp),
                        "memory": reduce_max_memory_across_pp_group({"peak": world.rank}, groups.pp)["peak"],
                        "norm": calc_params_l2_norm(model, None, pg_collection=groups),
                        "shares": None if shared is None else dist.get_process_group_ranks(shared),
                    }
                )
    return found


class _Groups:
    """Some of the groups of a run; the others are None."""

    def __init__(self, **groups: Any) -> None:
        vars(self).update(dict.fromkeys(NAMES) | groups)


def job_model(settings: dict[str, Any]) -> dict[str, Any]:
    """What functions that take groups give for a model on some layout, or in one process."""
    config = config_of(["train.micro_batch_size=3", *settings["keys"]], 1)
    config.validation.eval_iters = 2
    chunks, state, _ = divided(config, int(os.environ.get("WORLD_SIZE", "1")), dtype="float64")
    rank, groups = state.world.rank, state.pg_collection
    is_divided = state.world.size > 1
    stage = state.world.sizes.ranks // state.world.sizes.pp
    number = [None, 5][rank // stage] if is_divided else 5
    batches = [
        {key: torch.stack([Ragged()[index][key] for index in range(first, first + 3)]) for key in ("tokens", "labels")}
        for first in range(0, 24, 3)
    ]
    losses, _, _ = evaluate(state, STEPS["sum"], iter(batches), chunks, None, config, pg_collection=groups)
    assert losses is not None
    found: dict[str, Any] = {
        "norm": calc_params_l2_norm(chunks, config.model, pg_collection=groups),
        "losses": {key: float(one) for key, one in losses.items()},
        "largest": reduce_max_stat_across_model_parallel_group(number, groups.mp if is_divided else None),
        "all": logical_and_across_model_parallel_group(True, groups.mp if is_divided else None),
        "one not": logical_and_across_model_parallel_group(rank > 0, groups.mp if is_divided else None),
        "memory": reduce_max_memory_across_pp_group({"peak": 7 - rank}, groups.pp if is_divided else None)["peak"],
        "agrees": model_parallel_group(chunks, state.world) is not None,
    }
    if is_divided:
        found |= _in_other_forms(chunks, config, state)
    state.world.close()
    return found


def _in_other_forms(chunks: list[nn.Module], config: ConfigContainer, state: GlobalState) -> dict[str, Any]:
    """Norms of the same weights with some groups None, with Megatron's attributes, and with a weight in summands."""
    groups, norm = state.pg_collection, calc_params_l2_norm
    plain, replicas = nn.ParameterDict(), []
    for name, one in ((f"{n}.{k}", v) for n, chunk in enumerate(chunks) for k, v in chunk.named_parameters()):
        part = as_dtensor(one)
        assert part is not None
        is_shard = bool(part.placements[-1].is_shard())
        replicas += [] if is_shard else [part]
        parameter: Any = nn.Parameter(part.to_local().detach().clone())
        parameter.tensor_model_parallel = is_shard
        plain[name.replace(".", "/")] = parameter
    found = {
        "without tp": norm(chunks, config.model, pg_collection=_Groups(mp=groups.pp, tp_ep_pp=groups.pp)),
        "of a stage": norm(chunks, config.model, pg_collection=_Groups()),
        "by attributes": norm(plain, config.model, pg_collection=groups),
    }
    mesh, local = replicas[0].device_mesh, replicas[0].to_local().detach()
    share = local / 4 if state.world.rank % 2 else 3 * local / 4
    summands = nn.ParameterDict({"weight": nn.Parameter(DTensor.from_local(share, mesh, [Partial()]))})
    found["summands"] = norm(summands, config.model) / float(local.norm())
    try:
        calc_dtensor_params_l2_norm(summands.values())
    except ShardingError as error:
        found["refused"] = str(error)
    return found


def job_given(settings: dict[str, Any]) -> dict[str, Any]:
    """What `train()` and `evaluate()` say of groups that are given, and how many groups a run makes."""
    config = ConfigContainer()
    config.train.train_iters, config.train.micro_batch_size, config.train.global_batch_size = 1, 2, 4
    config.logger.log_interval, config.validation.eval_iters = 0, None
    with closing(open_world(DistributedInitConfig(device="cpu"))) as world:
        batches = itertools.repeat(split(RaggedRows(2), [2]).micro_batches[0])
        [model] = data_parallel([TinyModel()], world, config.ddp)
        alone = SimpleNamespace(dp=[dist.new_group([rank]) for rank in range(world.size)][world.rank], tp=None)
        before, errors = num_groups(), []
        state = GlobalState(config, world=world)
        for door in (_train, _evaluate):
            door(model, batches, state, state.pg_collection)
            try:
                door(model, batches, GlobalState(config, world=world), alone)
            except ConfigError as error:
                errors.append(str(error))
        return {"groups": num_groups() - before, "errors": errors}


def _train(model: nn.Module, batches: Any, state: GlobalState, groups: object) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(mean_step, [model], optimizer, None, batches, None, state, None, groups)


def _evaluate(model: nn.Module, batches: Any, state: GlobalState, groups: object) -> None:
    one = iter([next(batches)])
    evaluate(state, mean_step, one, [model], None, None, pg_collection=groups)
