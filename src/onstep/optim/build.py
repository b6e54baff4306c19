"""From the configuration of a run, or a user's own object, to the optimizer that the loop drives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from onstep.config.optimizer_config import OptimizerConfig
from onstep.config.optimizer_rules import check_param_groups
from onstep.config.part import nearest
from onstep.errors import ConfigError
from onstep.optim.foreign import ForeignOptimizer, MegatronOptimizer
from onstep.optim.loss_scaler import LossScaler
from onstep.optim.muon import MuonWithAdamW
from onstep.optim.optimizer import TrainingOptimizer
from onstep.optim.param_groups import param_groups
from onstep.optim.parameter_roles import trainable_parameters

OPTIMIZERS = ("adam", "adamw", "sgd", "muon")
_FUSED_DEVICES = ("cpu", "cuda")

Foreign = TypeVar("Foreign")
Groups = list[dict[str, Any]]


def build_optimizer(
    model_chunks: list[nn.Module], config: OptimizerConfig, *, scaler: LossScaler | None = None
) -> TrainingOptimizer:
    """The configured optimizer over the trainable parameters of all chunks, a shared parameter counted once.

    `adam` and `adamw` are both AdamW (decoupled weight decay), as in Megatron-Core; torch's fused kernels are used on
    CPU and CUDA. `muon` is torch's Muon for the matrices of the layers and AdamW for the rest: embeddings, the output
    matrix, biases, norms, and the weights of experts that are stacked in three dimensions.

    There are two groups: matrices and larger, with weight decay (`wd_mult` 1), and biases and other parameters of
    fewer than two dimensions, such as the scales of norms, without (`wd_mult` 0). Each is split further where there is
    Muon, a learning rate of embedding and output of its own (`is_decoupled_lr`), or `optimizer.param_groups`.

    Args:
        scaler: what scales the loss; see `build_loss_scaler`.

    Raises:
        ConfigError: the optimizer is unknown, it has no learning rate, nothing is trainable, or an entry of
            `optimizer.param_groups` is wrong or matches nothing.
    """
    if config.optimizer not in OPTIMIZERS:
        hint = nearest(config.optimizer, list(OPTIMIZERS))
        raise ConfigError(
            f"optimizer.optimizer must be one of {', '.join(OPTIMIZERS)}, got {config.optimizer!r}.{hint}"
        )
    if config.lr is None or config.lr < 0:
        raise ConfigError(f"optimizer.lr must be a number >= 0, got {config.lr}; set it, for example to 3e-4")
    check_param_groups(config)
    roles = trainable_parameters(model_chunks)
    if not roles:
        raise ConfigError(
            f"a model must have parameters with requires_grad, got none in {len(model_chunks)} chunk(s); "
            "unfreeze what is to be trained"
        )
    for_muon, others = param_groups(roles, config)
    if config.optimizer == "muon" and not for_muon:
        raise ConfigError(
            "optimizer.optimizer=muon takes matrices between embedding and output, got none to train; use adam"
        )
    optimizer = _muon(for_muon, others, config, config.lr) if for_muon else _plain(others, config, config.lr)
    return TrainingOptimizer(
        optimizer,
        clip_grad=config.clip_grad,
        order=list(roles),
        scaler=scaler,
        grad_norm_skip_threshold=config.grad_norm_skip_threshold,
        log_num_zeros_in_grad=config.log_num_zeros_in_grad,
    )


def build_loss_scaler(config: OptimizerConfig, mixed_precision: str | None) -> LossScaler | None:
    """The loss scaler that the configuration asks for.

    That of float16 is dynamic, or constant with `loss_scale`; bfloat16 has one only with `loss_scale`, and float32
    none, as in Megatron-Core.

    Raises:
        ConfigError: the scale starts below its minimum or above 2**96.
    """
    if config.loss_scale is not None and mixed_precision in ("fp16_mixed", "bf16_mixed"):
        return LossScaler.constant(config.loss_scale)
    if mixed_precision != "fp16_mixed":
        return None
    return LossScaler(
        config.initial_loss_scale,
        min_scale=config.min_loss_scale,
        window=config.loss_scale_window,
        hysteresis=config.hysteresis,
    )


def wrap_optimizer(
    optimizer: Foreign,
    clip_grad: float | None,
    *,
    scaler: LossScaler | None = None,
    grad_norm_skip_threshold: float | None = None,
    log_num_zeros_in_grad: bool = False,
) -> TrainingOptimizer | Foreign:
    """What the loop drives for a user's own `optimizer`.

    A torch optimizer is wrapped, with all of these settings. Anything else whose `step()` follows Megatron's
    convention, returning (update_successful, grad_norm, num_zeros), comes back as it is, and clips by itself.

    Raises:
        ConfigError: it has no `step()`.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        return TrainingOptimizer(
            optimizer,
            clip_grad=clip_grad,
            scaler=scaler,
            grad_norm_skip_threshold=grad_norm_skip_threshold,
            log_num_zeros_in_grad=log_num_zeros_in_grad,
        )
    if not callable(getattr(optimizer, "step", None)):
        raise ConfigError(
            f"an optimizer must have a step() method, got {type(optimizer).__name__}; pass a torch.optim.Optimizer"
        )
    return optimizer


def as_step_optimizer(
    optimizer: TrainingOptimizer | ForeignOptimizer | torch.optim.Optimizer | MegatronOptimizer,
    model: Sequence[nn.Module],
    config: OptimizerConfig,
    *,
    device: torch.device,
    scaler: LossScaler | None = None,
) -> TrainingOptimizer | ForeignOptimizer:
    """What the loop drives for any `optimizer`: itself, a torch optimizer wrapped, Megatron's convention adapted.

    One that the loop can drive already keeps its settings, and is given `scaler` where it has none.

    Raises:
        ConfigError: it has no `step()`.
    """
    threshold = config.grad_norm_skip_threshold
    if not isinstance(optimizer, TrainingOptimizer | ForeignOptimizer):
        zeros = config.log_num_zeros_in_grad
        optimizer = wrap_optimizer(
            optimizer, config.clip_grad, grad_norm_skip_threshold=threshold, log_num_zeros_in_grad=zeros
        )
    if not isinstance(optimizer, TrainingOptimizer | ForeignOptimizer):
        assert not isinstance(optimizer, torch.optim.Optimizer)
        optimizer = ForeignOptimizer(optimizer, model, device=device, grad_norm_skip_threshold=threshold)
    if optimizer.scaler is None and scaler is not None:
        optimizer.scaler = scaler
    return optimizer


def _plain(groups: Groups, config: OptimizerConfig, lr: float) -> torch.optim.Optimizer:
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=config.sgd_momentum, fused=_can_fuse(groups))
    return _adamw(groups, config, lr)


def _muon(for_muon: Groups, others: Groups, config: OptimizerConfig, lr: float) -> MuonWithAdamW:
    muon = torch.optim.Muon(
        for_muon,
        lr=lr,
        weight_decay=config.weight_decay,
        momentum=config.muon_momentum,
        nesterov=config.muon_nesterov,
        ns_steps=config.muon_num_ns_steps,
        adjust_lr_fn=config.muon_adjust_lr_fn,
    )
    return MuonWithAdamW(muon, _adamw(others, config, lr) if others else None)


def _adamw(groups: Groups, config: OptimizerConfig, lr: float) -> torch.optim.AdamW:
    betas = (config.adam_beta1, config.adam_beta2)
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=config.adam_eps, fused=_can_fuse(groups))


def _can_fuse(groups: Groups) -> bool:
    """Whether torch has fused kernels for all of these parameters."""
    params = [param for group in groups for param in group["params"]]
    return all(param.device.type in _FUSED_DEVICES and param.is_floating_point() for param in params)
