"""Builds torch's optimizer, or the two of Muon, for the groups of a configuration."""

from __future__ import annotations

from typing import Any

import torch

from onstep.config import OptimizerConfig
from onstep.optim.low_precision import LowPrecisionOptimizer
from onstep.optim.muon import MuonWithAdamW
from onstep.optim.sharded_muon import Float32Muon

Group = dict[str, Any]

_FUSED_DEVICES = ("cpu", "cuda")


def optimizer_of(
    for_muon: list[Group], others: list[Group], config: OptimizerConfig, lr: float, *, seed: int
) -> torch.optim.Optimizer:
    """The configured optimizer over groups for Muon, if there are any, and groups for AdamW or SGD.

    Args:
        seed: for stochastic rounding.
    """
    if config.optimizer == "sgd":
        optimizers: list[torch.optim.Optimizer] = [
            torch.optim.SGD(others, lr=lr, momentum=config.sgd_momentum, fused=_can_fuse(others))
        ]
    else:
        optimizers = [_muon(for_muon, config, lr)] if for_muon else []
        optimizers += [_adamw(others, config, lr)] if others else []
    is_low, averages = config.params_dtype == "bfloat16", low_averages(config)
    if is_low or averages:
        has_masters = config.main_params_dtype == "float32"
        return LowPrecisionOptimizer(
            optimizers, has_masters=has_masters, rounding=config.rounding, seed=seed, averages=averages, is_low=is_low
        )
    first, *adamw = optimizers
    return MuonWithAdamW(first, *adamw) if isinstance(first, torch.optim.Muon) else first  # type: ignore[arg-type]


def low_averages(config: OptimizerConfig) -> dict[str, torch.dtype]:
    """The averages of AdamW whose types are not float32, with them.

    Args:
        config: the section `optimizer` of a configuration.
    """
    asked = {"exp_avg": config.exp_avg_dtype, "exp_avg_sq": config.exp_avg_sq_dtype}
    low = {name: getattr(torch, dtype) for name, dtype in asked.items() if dtype != "float32"}
    return low if config.use_precision_aware_optimizer else {}


def _muon(for_muon: list[Group], config: OptimizerConfig, lr: float) -> torch.optim.Muon:
    kind = Float32Muon if config.muon_fp32_matmul_prec == "highest" else torch.optim.Muon
    return kind(
        for_muon,
        lr=lr,
        weight_decay=config.weight_decay,
        momentum=config.muon_momentum,
        nesterov=config.muon_nesterov,
        ns_steps=config.muon_num_ns_steps,
        adjust_lr_fn=config.muon_adjust_lr_fn,
    )


def _adamw(groups: list[Group], config: OptimizerConfig, lr: float) -> torch.optim.AdamW:
    betas = (config.adam_beta1, config.adam_beta2)
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=config.adam_eps, fused=_can_fuse(groups))


def _can_fuse(groups: list[Group]) -> bool:
    """Whether torch has fused kernels for all of these parameters."""
    params = [param for group in groups for param in group["params"]]
    return all(param.device.type in _FUSED_DEVICES and param.is_floating_point() for param in params)
