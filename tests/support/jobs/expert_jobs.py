"""What the ranks of the tests of experts run: `job_*(settings)`."""

from __future__ import annotations

import copy
import json
import logging
import os
from pathlib import Path
from typing import Any

import torch

from onstep import Callback, pretrain
from onstep.callbacks import RouterMonitor
from onstep.config import ConfigContainer, DistributedDataParallelConfig, DistributedInitConfig, apply_overrides
from onstep.distributed import data_parallel, open_world
from onstep.models.layers.router import Router
from onstep.recipes import tiny_gpt_pretrain_config
from tests.support.expert_runs import labels_of, moe_model, reference_gradient, step_gradient, sum_step
from tests.support.small_runs import RaggedRows, small_state, split

RANK = int(os.environ.get("RANK", "0"))


def write(result: dict[str, Any]) -> None:
    Path(f"rank-{RANK}.json").write_text(json.dumps(result))


def share_of(rank: int, sizes: list[int]) -> Any:
    """Four rows of eight, in micro-batches of the given sizes."""
    rows = RaggedRows(8)
    half = torch.utils.data.Subset(rows, range(4 * rank, 4 * rank + 4))
    return split(half, sizes)


def job_gradient(settings: dict[str, Any]) -> None:
    """The gradient of a step on two ranks against the reference of both."""
    world = open_world(DistributedInitConfig(device="cpu"))
    model = moe_model(
        recompute_granularity=settings["recompute"],
        moe_router_enable_expert_bias=True,
        moe_grouped_gemm=settings["grouped"],
    )
    batches = [share_of(rank, settings["sizes"]).micro_batches for rank in range(2)]
    labels = [[labels_of(batch) for batch in rank] for rank in batches]
    total = sum(map(sum, labels))
    expected = None
    if not settings["starved"]:
        expected, _ = reference_gradient(copy.deepcopy(model), batches, [[n / total for n in rank] for rank in labels])
    state = small_state(batch=8, micro=settings["sizes"][0])
    state.world, state.num_microbatches = world, len(settings["sizes"])
    options = DistributedDataParallelConfig(broadcast_buffers=False)
    wrapped = data_parallel([model], world, options)[0]
    if settings["starved"]:
        for one in model.modules():
            if isinstance(one, Router):  # the last expert gets no token on any rank, another none on rank 1
                one.expert_bias[3] = -100.0
                one.expert_bias[2] = -100.0 if RANK else 0.0
    gradient = step_gradient(wrapped, sum_step, share_of(RANK, settings["sizes"]), state)
    gradient = {name.removeprefix("module."): one for name, one in gradient.items()}
    routers = [one for one in model.modules() if isinstance(one, Router)]
    rows = state.experts.rows(state.experts.last)
    result = {
        "loads": [row[:4].tolist() for row in rows],
        "local": [router.record.row[:4].tolist() for router in routers],
        "bias": [router.expert_bias.tolist() for router in routers],
        "norm": sum(float(one.double().square().sum()) for one in gradient.values()),
        "unused": float(gradient["layers.0.feed_forward.experts.up_weight"][3].abs().max()),
    }
    if expected is not None:
        result["error"] = max(float((gradient[name].double() - expected[name]).abs().max()) for name in expected)
        result["scale"] = max(float(one.abs().max()) for one in expected.values())
    world.close()
    write(result)


class Collapsing(Callback):
    """Forces the router of the last layer to its first two experts."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def on_train_start(self, context: Any) -> None:
        routers = [one for one in context.model[0].modules() if isinstance(one, Router)]
        routers[-1].expert_bias[:2] = 100.0

    def on_log(self, context: Any) -> None:
        self.records.append({name: value for name, value in context.logs.items() if "moe" in name or "loss" in name})


def config(settings: dict[str, Any]) -> ConfigContainer:
    made = tiny_gpt_pretrain_config()
    made.dataset.paths, made.dataset.cache_dir = [settings["corpus"]], settings["cache"]
    apply_overrides(
        made,
        [
            "dataset.split='80,10,10'",
            "dataset.seq_length=32",
            "model.seq_length=32",
            "model.num_layers=2",
            "model.hidden_size=32",
            "model.ffn_hidden_size=32",
            "model.num_attention_heads=2",
            "model.num_moe_experts=4",
            "model.moe_router_score_function=sigmoid",
            "model.moe_router_enable_expert_bias=true",
            "model.moe_router_bias_update_rate=0",
            "model.moe_router_load_balancing_type=[aux_loss,global_aux_loss]",
            "model.moe_aux_loss_coeff=[0.01,0.01]",
            "model.mtp_num_layers=1",
            "train.train_iters=4",
            "train.global_batch_size=8",
            "train.micro_batch_size=2",
            "scheduler.lr_warmup_iters=1",
            "validation.eval_on_start=false",
            "validation.eval_iters=1",
            "logger.log_interval=2",
            "dist.device=cpu",
            *settings.get("overrides", []),
        ],
    )
    return made


def job_collapse(settings: dict[str, Any]) -> None:
    """A whole run in which the router of one layer has collapsed."""
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("onstep.callbacks.router_monitor").addHandler(handler)
    probe = Collapsing()
    pretrain(config(settings), callbacks=[RouterMonitor(), probe])
    write({"records": probe.records, "warnings": warnings})
