"""From the configuration, or a user's own object, to the optimizer of the loop."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from onstep.config import OptimizerConfig
from onstep.errors import ConfigError
from onstep.optim import TrainingOptimizer, build_optimizer, wrap_optimizer


def test_matrices_decay_and_biases_and_norms_do_not() -> None:
    model = nn.Sequential(nn.Embedding(4, 6), nn.Linear(6, 6), nn.LayerNorm(6))
    optimizer = build_optimizer([model], OptimizerConfig(lr=0.1, weight_decay=0.2))
    decayed, plain = optimizer.param_groups
    assert [tuple(p.shape) for p in decayed["params"]] == [(4, 6), (6, 6)]
    assert [tuple(p.shape) for p in plain["params"]] == [(6,), (6,), (6,)]
    assert (decayed["weight_decay"], decayed["wd_mult"]) == (0.2, 1.0)
    assert (plain["weight_decay"], plain["wd_mult"]) == (0.0, 0.0)


def test_a_bias_of_two_dimensions_does_not_decay() -> None:
    model = nn.ParameterDict({"bias": nn.Parameter(torch.ones(2, 2)), "weight": nn.Parameter(torch.ones(2, 2))})
    decayed, plain = build_optimizer([model], OptimizerConfig(lr=0.1)).param_groups
    assert decayed["params"] == [model["weight"]]
    assert plain["params"] == [model["bias"]]


def test_only_trainable_parameters_of_all_chunks_and_shared_ones_once() -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    second.bias.requires_grad_(False)
    optimizer = build_optimizer([first, second], OptimizerConfig(lr=0.1))
    assert [p for group in optimizer.param_groups for p in group["params"]] == [first.weight, first.bias]


def test_a_group_without_parameters_is_left_out() -> None:
    optimizer = build_optimizer([nn.Linear(3, 3, bias=False)], OptimizerConfig(lr=0.1))
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_adam_is_fused_adamw_with_the_configured_values(name: str) -> None:
    config = OptimizerConfig(optimizer=name, lr=0.1, adam_beta1=0.8, adam_beta2=0.95, adam_eps=1e-6, clip_grad=0.5)
    optimizer = build_optimizer([nn.Linear(3, 3)], config)
    assert type(optimizer.optimizer) is torch.optim.AdamW
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"], group["fused"]) == (0.1, (0.8, 0.95), 1e-6, True)
    assert optimizer.clip_grad == 0.5


def test_sgd_has_the_configured_momentum() -> None:
    optimizer = build_optimizer([nn.Linear(3, 3)], OptimizerConfig(optimizer="sgd", lr=0.1, sgd_momentum=0.7))
    assert type(optimizer.optimizer) is torch.optim.SGD
    assert optimizer.param_groups[0]["momentum"] == 0.7


def test_what_cannot_be_fused_is_not() -> None:
    model = nn.ParameterList([nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))])
    assert build_optimizer([model], OptimizerConfig(lr=0.1)).param_groups[0]["fused"] is False


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (OptimizerConfig(optimizer="adamm", lr=0.1), "got 'adamm'. Did you mean 'adam"),
        (OptimizerConfig(), "optimizer.lr must be a number >= 0, got None"),
        (OptimizerConfig(lr=-1.0), "got -1.0"),
    ],
)
def test_impossible_configurations_are_refused(config: OptimizerConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_optimizer([nn.Linear(3, 3)], config)


def test_nothing_to_train_is_refused() -> None:
    with pytest.raises(ConfigError, match="must have parameters with requires_grad"):
        build_optimizer([nn.Linear(3, 3).requires_grad_(False)], OptimizerConfig(lr=0.1))


class MegatronLike:
    """Follows Megatron's convention and is no torch optimizer."""

    def step(self) -> tuple[bool, None, None]:
        return True, None, None


def test_a_torch_optimizer_is_wrapped_and_a_foreign_one_is_not() -> None:
    inner = torch.optim.SGD([nn.Parameter(torch.ones(2))])
    wrapped = wrap_optimizer(inner, 0.5)
    assert isinstance(wrapped, TrainingOptimizer)
    assert (wrapped.optimizer, wrapped.clip_grad) == (inner, 0.5)
    foreign = MegatronLike()
    assert wrap_optimizer(foreign, 0.5) is foreign
    assert wrap_optimizer(wrapped, None) is wrapped


def test_what_cannot_step_is_no_optimizer() -> None:
    with pytest.raises(ConfigError, match="must have a step\\(\\) method, got Linear"):
        wrap_optimizer(nn.Linear(1, 1), 1.0)
