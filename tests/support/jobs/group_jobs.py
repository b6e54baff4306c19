"""What each rank finds in the process groups of a run: `job_*(settings)`."""

from __future__ import annotations

import itertools
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from onstep.config import ConfigContainer, DistributedInitConfig
from onstep.distributed import ParallelSizes, data_parallel, open_world
from onstep.errors import ConfigError
from onstep.metrics import (
    calc_params_l2_norm,
    logical_and_across_model_parallel_group,
    reduce_max_memory_across_pp_group,
    reduce_max_stat_across_model_parallel_group,
)
from onstep.training import GlobalState, evaluate, train
from onstep.training.model_parallel.agreement import model_parallel_group
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
