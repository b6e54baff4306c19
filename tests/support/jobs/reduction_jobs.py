"""What the ranks of the tests of reductions and whole norms run: `job_*(settings)`."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from onstep.config import ModelConfig, OptimizerConfig
from onstep.data import StepBatches
from onstep.errors import ConfigError
from onstep.metrics import (
    calc_dtensor_params_l2_norm,
    calc_params_l2_norm,
    logical_and_across_model_parallel_group,
    reduce_max_memory_across_pp_group,
    reduce_max_stat_across_model_parallel_group,
)
from onstep.metrics.norms.parameter_norms import parameter_norms, total_norm
from onstep.models import build_transformer
from onstep.optim import build_optimizer
from onstep.training import train_step
from tests.support.small_runs import small_state

RANK = int(os.environ["RANK"])
BIG = 2**24 + 1

STATS: list[tuple[Any, Any]] = [
    (None, None),
    (None, -3.5),
    (-1.0, None),
    (-2, -7),
    (BIG, BIG - 1),
    (2**62 + 1, -5),
    (3, 2.5),
    (2, 2.5),
    (float("-inf"), None),
    (float("inf"), 1e300),
    (1.0, float("nan")),
    (-1e300, -1e-300),
    (np.float32(0.5), np.int64(-4)),
    (torch.tensor(7), torch.tensor([9])),
    (torch.tensor(1.5), None),
    (0.0, -0.0),
    (np.True_, False),
]

ANSWERS: list[tuple[Any, Any]] = [
    (True, True),
    (True, False),
    (np.True_, 1),
    (np.bool_(False), True),
    (1, 0),
    (torch.tensor(True), torch.tensor([1])),
]


def write(result: dict[str, Any]) -> None:
    Path(f"rank-{RANK}.json").write_text(json.dumps(result))


def job_reductions(settings: dict[str, Any]) -> None:
    """Every statistic and answer of the tables, this rank's column; over nccl where the settings say so."""
    backend = settings.get("backend", "gloo")
    if backend == "nccl":
        torch.cuda.set_device(RANK)
    dist.init_process_group(backend)
    group, alone = dist.group.WORLD, dist.new_group([0])
    reduced = [reduce_max_stat_across_model_parallel_group(pair[RANK], group) for pair in STATS]
    agreed = [logical_and_across_model_parallel_group(pair[RANK], group) for pair in ANSWERS]
    mine = reduce_max_stat_across_model_parallel_group(-5, alone if RANK == 0 else None)
    memory = reduce_max_memory_across_pp_group({"bytes": np.int64(3 + RANK), "share": 0.5 - RANK}, group)
    kinds = [[type(one).__name__, one] for one in memory.values()]
    write(
        {
            "stats": [[type(one).__name__, str(one)] for one in reduced],
            "answers": agreed,
            "alone": mine,
            "memory": kinds,
        }
    )
    dist.destroy_process_group()


def job_reductions_on_a_mesh(settings: dict[str, Any]) -> dict[str, Any]:
    """Four ranks: reductions over each dimension of a mesh, where some ranks have no number, or no group at all."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    stages, tensor = mesh["pp"].get_group(), mesh["tp"].get_group()
    pair = dist.new_group([1, 2])  # of which ranks 0 and 3 get torch's mark for a group without them
    number = [None, 2**53 + 1, None, -7][RANK]
    return {
        "largest": [
            reduce_max_stat_across_model_parallel_group(number, group)
            for group in (stages, tensor, dist.group.WORLD, pair, None)
        ],
        "none": reduce_max_stat_across_model_parallel_group(None, dist.group.WORLD),
        "and": [
            logical_and_across_model_parallel_group(RANK != 3, group)
            for group in (stages, tensor, dist.group.WORLD, pair, None)
        ],
        "memory": [
            dict(reduce_max_memory_across_pp_group({"bytes": 10 + RANK, "share": 0.5 * RANK}, group))
            for group in (stages, pair, None)
        ],
    }


def exact(*tensors: Tensor) -> float:
    return float(torch.cat([one.detach().double().flatten() for one in tensors]).norm())


def marked(values: Tensor, **marks: Any) -> nn.Parameter:
    parameter = nn.Parameter(values.clone())
    for name, value in marks.items():
        setattr(parameter, name, value)
    return parameter


def job_model_parallel_norm(settings: dict[str, Any]) -> None:
    """Four ranks: two of tensor parallelism, twice for data; every parameter made whole gives the truth."""
    dist.init_process_group("gloo")
    groups = {
        name: [dist.new_group(ranks) for ranks in lists][index]
        for name, lists, index in [
            ("tp", ([0, 1], [2, 3]), RANK // 2),
            ("dp", ([0, 2], [1, 3]), RANK % 2),
        ]
    }
    tensor_rank, data_rank = RANK % 2, RANK // 2
    generator = torch.Generator().manual_seed(0)
    whole = {
        name: torch.randn(8, 4, generator=generator) for name in ("split", "same", "tied", "main", "experts", "sharded")
    }
    half = slice(4 * tensor_rank, 4 * tensor_rank + 4)
    quarter = slice(4 * tensor_rank + 2 * data_rank, 4 * tensor_rank + 2 * data_rank + 2)
    model = nn.ParameterDict(
        {
            "split": marked(whole["split"][half], tensor_model_parallel=True),
            "same": marked(whole["same"]),
            "tied": marked(whole["tied"], shared=True),
            "main": marked(
                whole["main"].bfloat16()[half], tensor_model_parallel=True, main_param=whole["main"][half].clone()
            ),
            "sharded": marked(
                whole["sharded"].bfloat16()[half],
                tensor_model_parallel=True,
                main_param=whole["sharded"][quarter].clone(),
                main_param_sharded=True,
            ),
            "experts": marked(whole["experts"][half], allreduce=False, tensor_model_parallel=True),
        }
    )
    model.pg_collection = SimpleNamespace(
        tp=groups["tp"], mp=groups["tp"], dp_cp=groups["dp"], tp_ep_pp=groups["tp"], expt_tp=groups["tp"]
    )
    counted = [whole[name] for name in ("split", "same", "experts")]
    low = [whole[name].bfloat16() for name in ("main", "sharded")]
    bf16 = SimpleNamespace(bf16=True)
    result: dict[str, Any] = {
        "main": calc_params_l2_norm(model, bf16),
        "exact_main": exact(*counted, whole["main"], whole["sharded"]),
        "copied": calc_params_l2_norm([model], bf16, force_create_fp32_copy=True),
        "exact_copied": exact(*counted, *low),
        "float32": calc_params_l2_norm(model, SimpleNamespace(bf16=False)),
    }
    # experts that differ between all four ranks: their own groups
    model.experts = marked(whole["experts"][quarter], allreduce=False, tensor_model_parallel=True)
    model.pg_collection.tp_ep_pp = dist.group.WORLD
    result["own_groups"] = calc_params_l2_norm(model, bf16)
    empty = nn.ParameterDict()
    empty.pg_collection = SimpleNamespace(mp=dist.group.WORLD)
    stage = nn.Linear(2, 2) if RANK else empty
    stage.pg_collection = empty.pg_collection
    result["stages"] = calc_params_l2_norm(stage, None)
    gathered: list[Any] = [None] * 4
    dist.all_gather_object(gathered, [one.detach() for one in stage.parameters()])
    result["exact_stages"] = exact(*[one for of_rank in gathered for one in of_rank])
    write(result)
    dist.destroy_process_group()


class Foreign:
    """An optimizer of Megatron's kind that says what it is told to say."""

    def __init__(self, model: nn.Module, results: list[tuple[bool, float | None, int | None]]) -> None:
        self.param_groups = [{"params": list(model.parameters()), "lr": 0.1}]
        self.results = iter(results)

    def zero_grad(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None

    def step(self) -> tuple[bool, float | None, int | None]:
        return next(self.results)


def job_agreed_updates(settings: dict[str, Any]) -> None:
    """Steps of a model over two ranks, whose optimizers say different things; with both options each way."""
    dist.init_process_group("gloo")
    said = [
        [(True, 2.0, 5), (True, 3.0, 2**24 + 1)],
        [(True, 1.0, None), (False, None, None)],
        [(False, None, None), (False, None, None)],
    ]
    model = nn.Linear(2, 1)
    model.pg_collection = SimpleNamespace(mp=dist.group.WORLD)
    found = []
    for checks in (True, False):
        optimizer = Foreign(model, [pair[RANK] for pair in said])
        for _ in said:
            state = small_state(check_optimizer_step_success=checks, skip_sync_grad_norm_across_mp=not checks)
            batches = StepBatches([{"x": torch.ones(4, 2)}], None, 4, [False])

            def step(data_iterator: Any, model: nn.Module) -> Any:
                return model(next(data_iterator)["x"]).mean(), lambda loss: (loss, {})

            result = train_step(step, batches, [model], optimizer, None, state)
            found.append([result.skipped_iter, result.grad_norm, result.num_zeros_in_grad])
    write({"found": found})
    dist.destroy_process_group()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.middle, self.scale = nn.Embedding(13, 7), nn.Linear(7, 7), nn.Parameter(torch.randn(1))
        self.head = nn.Linear(7, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.head(self.scale * self.middle(self.embed(tokens)))
        return scores


def job_sharded_norm(settings: dict[str, Any]) -> None:
    """A model of FSDP2 and tensors split every way over two ranks."""
    dist.init_process_group("gloo")
    plain, sharded = Tied(), fully_shard(Tied())
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "model"))
    values = torch.randn(6, 5, generator=torch.Generator().manual_seed(3))
    placed = [
        distribute_tensor(values * factor, mesh, placements)
        for factor, placements in [
            (1.0, (Replicate(), Shard(0))),
            (2.0, (Replicate(), Replicate())),
            (3.0, (Shard(0), Shard(1))),
            (4.0, (Replicate(), Shard(1))),
        ]
    ]
    single = distribute_tensor(torch.full((1, 3), 2.0), mesh, (Replicate(), Shard(0)))  # nothing on the second rank
    result: dict[str, Any] = {
        "exact": exact(*plain.parameters()),
        "model": calc_params_l2_norm(sharded, None),
        "by_names": total_norm(parameter_norms(sharded)),
        "fully": calc_params_l2_norm(sharded, None, use_megatron_fsdp=True),
        "dtensors": calc_dtensor_params_l2_norm([*placed, single]),
        "exact_dtensors": exact(*[values * factor for factor in (1, 2, 3, 4)], torch.full((3,), 2.0)),
    }
    partial = DTensor.from_local(torch.ones(2), mesh, [Replicate(), Partial()])
    for name, call in {
        "partial": lambda: calc_dtensor_params_l2_norm([partial]),
        "plain": lambda: calc_params_l2_norm([plain], None, use_megatron_fsdp=True),
    }.items():
        try:
            call()
        except RuntimeError as error:  # as in Megatron Bridge
            result[name] = str(error) if isinstance(error, ConfigError) else repr(error)
    write(result)
    dist.destroy_process_group()


def job_zeros_and_muon(settings: dict[str, Any]) -> None:
    """Zeros of sharded gradients, and Muon on shards, beside the same model whole."""
    dist.init_process_group("gloo")
    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 32, "seq_length": 8}
    plain, sharded = (build_transformer(ModelConfig(**sizes), seed=0) for _ in range(2))
    fully_shard(sharded.layers[0])
    fully_shard(sharded)
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")
    config = OptimizerConfig(optimizer="muon", lr=0.02, log_num_zeros_in_grad=True)
    optimizers = [build_optimizer([model], config) for model in (plain, sharded)]
    tokens = torch.arange(8).reshape(1, 8)
    zeros = []
    for _ in range(3):
        for model, optimizer in zip((plain, sharded), optimizers, strict=True):
            optimizer.zero_grad()
            model(tokens, tokens).mean().backward()
            is_applied, _, count = optimizer.step()
            assert is_applied
            assert count is not None
            zeros.append(int(count))
    expected = 3 * [sum(int((p.grad == 0).sum()) for p in plain.parameters())]
    start = build_transformer(ModelConfig(**sizes), seed=0)
    gap = moved = 0.0
    with torch.no_grad():
        for a, b, c in zip(plain.parameters(), sharded.parameters(), start.parameters(), strict=True):
            gap = max(gap, float((b.full_tensor() - a).norm()))
            moved = max(moved, float((a - c).norm()))
    write({"zeros": zeros, "expected": expected, "gap": gap, "moved": moved})
    dist.destroy_process_group()
