"""From the configuration of a run, or a user's own object, to the optimizer that the loop drives."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn

from onstep.config.part import nearest
from onstep.config.parts import OptimizerConfig
from onstep.errors import ConfigError
from onstep.optim.loss_scaler import LossScaler
from onstep.optim.optimizer import TrainingOptimizer

OPTIMIZERS = ("adam", "adamw", "sgd")
_FUSED_DEVICES = ("cpu", "cuda")

Foreign = TypeVar("Foreign")


def build_optimizer(
    model_chunks: list[nn.Module], config: OptimizerConfig, *, scaler: LossScaler | None = None
) -> TrainingOptimizer:
    """The configured optimizer over the trainable parameters of all chunks, a shared parameter counted once.

    `adam` and `adamw` are both AdamW (decoupled weight decay), as in Megatron-Core; torch's fused kernels are used on
    CPU and CUDA. There are two groups: matrices and larger, with weight decay (`wd_mult` 1), and biases and other
    parameters of fewer than two dimensions, such as the scales of norms, without (`wd_mult` 0).

    Args:
        scaler: what scales the loss; see `build_loss_scaler`.

    Raises:
        ConfigError: the optimizer is unknown, it has no learning rate, or nothing is trainable.
    """
    if config.optimizer not in OPTIMIZERS:
        hint = nearest(config.optimizer, list(OPTIMIZERS))
        raise ConfigError(
            f"optimizer.optimizer must be one of {', '.join(OPTIMIZERS)}, got {config.optimizer!r}.{hint}"
        )
    if config.lr is None or config.lr < 0:
        raise ConfigError(f"optimizer.lr must be a number >= 0, got {config.lr}; set it, for example to 3e-4")
    groups = _param_groups(model_chunks, config.weight_decay)
    optimizer = _torch_optimizer(groups, config, config.lr)
    order = list(_trainable(model_chunks))
    return TrainingOptimizer(optimizer, clip_grad=config.clip_grad, order=order, scaler=scaler)


def build_loss_scaler(config: OptimizerConfig, mixed_precision: str | None) -> LossScaler | None:
    """The loss scaler that the configuration asks for; None for any precision but float16.

    Raises:
        ConfigError: the scale starts below its minimum or above 2**96.
    """
    if mixed_precision != "fp16_mixed":
        return None
    if config.loss_scale is not None:
        return LossScaler.constant(config.loss_scale)
    return LossScaler(
        config.initial_loss_scale,
        min_scale=config.min_loss_scale,
        window=config.loss_scale_window,
        hysteresis=config.hysteresis,
    )


def wrap_optimizer(
    optimizer: Foreign, clip_grad: float | None, *, scaler: LossScaler | None = None
) -> TrainingOptimizer | Foreign:
    """What the loop drives for a user's own `optimizer`.

    A torch optimizer is wrapped, with the `scaler`. Anything else whose `step()` follows Megatron's convention,
    returning (update_successful, grad_norm, num_zeros), comes back as it is, and clips by itself.

    Raises:
        ConfigError: it has no `step()`.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        return TrainingOptimizer(optimizer, clip_grad=clip_grad, scaler=scaler)
    if not callable(getattr(optimizer, "step", None)):
        raise ConfigError(
            f"an optimizer must have a step() method, got {type(optimizer).__name__}; pass a torch.optim.Optimizer"
        )
    return optimizer


def _param_groups(model_chunks: list[nn.Module], weight_decay: float) -> list[dict[str, Any]]:
    """The groups that are not empty, matrices first."""
    trainable = _trainable(model_chunks)
    if not trainable:
        raise ConfigError(
            f"a model must have parameters with requires_grad, got none in {len(model_chunks)} chunk(s); "
            "unfreeze what is to be trained"
        )
    decayed = [param for param, name in trainable.items() if _is_decayed(name, param)]
    plain = [param for param, name in trainable.items() if not _is_decayed(name, param)]
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": weight_decay, "wd_mult": 1.0},
        {"params": plain, "weight_decay": 0.0, "wd_mult": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _trainable(model_chunks: list[nn.Module]) -> dict[nn.Parameter, str]:
    """Each trainable parameter, in the order of the chunks, with its first name."""
    names: dict[nn.Parameter, str] = {}
    for chunk in model_chunks:
        for name, param in chunk.named_parameters():
            if param.requires_grad:
                names.setdefault(param, name)
    return names


def _is_decayed(name: str, param: nn.Parameter) -> bool:
    return param.ndim >= 2 and not name.endswith("bias")


def _torch_optimizer(groups: list[dict[str, Any]], config: OptimizerConfig, lr: float) -> torch.optim.Optimizer:
    fused = all(_can_fuse(param) for group in groups for param in group["params"])
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=config.sgd_momentum, fused=fused)
    betas = (config.adam_beta1, config.adam_beta2)
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=config.adam_eps, fused=fused)


def _can_fuse(param: nn.Parameter) -> bool:
    return param.device.type in _FUSED_DEVICES and param.is_floating_point()
