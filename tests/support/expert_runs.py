"""Steps of a small mixture of experts, and their gradient computed in float64 from the formulas."""

from __future__ import annotations

import copy
from typing import Any

import torch

from onstep.config import ModelConfig
from onstep.models import build_transformer
from onstep.models.layers.router import Router
from onstep.optim import TrainingOptimizer
from onstep.training import LossShare, train_step
from tests.support.expert_reference import balancing, sequence_balancing, z
from tests.support.small_runs import LENGTH, VOCABULARY

COEFFICIENTS = {"aux_loss": 0.5, "seq_aux_loss": 0.25, "global_aux_loss": 0.125}
Z = 0.01


def moe_config(**options: Any) -> ModelConfig:
    sizes: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "ffn_hidden_size": 16,
        "vocab_size": VOCABULARY,
        "seq_length": LENGTH,
        "init_method_std": 0.3,
        "num_moe_experts": 4,
        "moe_router_load_balancing_type": list(COEFFICIENTS),
        "moe_aux_loss_coeff": list(COEFFICIENTS.values()),
        "moe_z_loss_coeff": Z,
    }
    return ModelConfig(**(sizes | options))


def moe_model(**options: Any) -> Any:
    return build_transformer(moe_config(**options), seed=0)


def sum_step(data_iterator: Any, model: Any) -> Any:
    batch = next(data_iterator)
    loss = model(batch["tokens"], batch["labels"], reduction="sum")
    return loss, lambda loss: (loss, batch["labels"].ne(-100).sum(), {})


def mean_step(data_iterator: Any, model: Any) -> Any:
    batch = next(data_iterator)
    loss = model(batch["tokens"], batch["labels"], reduction="sum") / batch["labels"].ne(-100).sum()
    return loss, lambda loss: (loss, {})


def share_step(total: int) -> Any:
    def step(data_iterator: Any, model: Any) -> Any:
        batch = next(data_iterator)
        loss = model(batch["tokens"], batch["labels"], reduction="sum") / total
        return loss, lambda loss: LossShare(loss, batch["labels"].ne(-100).sum(), {})

    return step


def step_gradient(model: Any, step: Any, batches: Any, state: Any, **options: Any) -> dict[str, Any]:
    """What one step's gradient is, from the weights before and after an update of SGD with rate 1."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = TrainingOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), clip_grad=0.0, **options)
    train_step(step, batches, [model], optimizer, None, state)
    return {name: before[name] - p.detach() for name, p in model.named_parameters()}


def labels_of(batch: Any) -> int:
    return int(batch["labels"].ne(-100).sum())


def reference_gradient(
    model: Any, ranks: list[list[Any]], weights: list[list[float]]
) -> tuple[dict[str, Any], dict[str, float]]:
    """Gradient and losses of a step in float64: the main loss, and the weighted mean of the auxiliary ones.

    Args:
        ranks: the micro-batches of each rank.
        weights: how much each micro-batch's auxiliary losses count, in sum 1.
    """
    model, config = copy.deepcopy(model).double(), model.config
    routers = [one for one in model.modules() if isinstance(one, Router)]
    inputs: dict[Any, Any] = {}
    for router in routers:
        router.coefficients = {}
        router.register_forward_hook(lambda module, given, out: inputs.__setitem__(module, given[0]))
    labels = sum(labels_of(batch) for rank in ranks for batch in rank)
    total, seen = torch.zeros((), dtype=torch.float64), {router: [0] * 4 for router in routers}
    means = dict.fromkeys((*COEFFICIENTS, "z_loss"), 0.0)
    count = sum(map(len, ranks))
    for index in range(len(ranks[0])):
        given = []
        for rank in ranks:  # the global loss counts the choices of all ranks before any rank's loss is known
            main = model(rank[index]["tokens"], rank[index]["labels"], reduction="sum")
            given.append((main, dict(inputs)))
            for router in routers:
                _, chosen = balancing(config, router.weight.detach(), inputs[router].detach().flatten(0, 1))
                seen[router] = [a + b for a, b in zip(seen[router], chosen, strict=True)]
        for rank, (main, x_of) in enumerate(given):
            total = total + main / labels
            for router in routers:
                x, weight = x_of[router], router.weight
                losses = {
                    "aux_loss": balancing(config, weight, x.flatten(0, 1))[0],
                    "seq_aux_loss": sequence_balancing(config, weight, x),
                    "global_aux_loss": balancing(config, weight, x.flatten(0, 1), choices=seen[router])[0],
                    "z_loss": z(weight, x.flatten(0, 1)),
                }
                for name, loss in losses.items():
                    coefficient = COEFFICIENTS.get(name, Z)
                    total = total + coefficient * weights[rank][index] * loss
                    means[name] += loss.item() / count / len(routers)
    total.backward()
    return {name: p.grad for name, p in model.named_parameters()}, means
