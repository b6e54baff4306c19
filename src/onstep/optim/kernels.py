"""Torch's fused kernels of AdamW, Adam and SGD, and its Muon, over lists of parameters, gradients and state."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import _muon as torch_muon

from onstep.distributed.shards import held_like, held_parts
from onstep.optim import sharded_muon

Group = dict[str, Any]
State = dict[str, Tensor]
Columns = list[list[Tensor]]
"""For each of a kernel's state keys, the states of all parameters."""


class Batch(NamedTuple):
    """Parameters that a kernel processes at once: of one group, device and type, each with a gradient."""

    group: Group
    device: torch.device
    params: list[Tensor]
    states: list[State]
    is_sharded: bool = False
    """Whether the parameters are DTensors."""


def shards(batch: Batch, grads: list[Tensor], columns: Columns) -> tuple[Batch, list[Tensor], Columns]:
    """This rank's shards of what a kernel gets."""
    parts = held_like(grads, batch.params)
    return batch._replace(params=held_parts(batch.params)), parts, list(map(held_parts, columns))


class Kernel(NamedTuple):
    """One of torch's optimizers."""

    columns: Callable[[Group, list[State]], Columns | None]
    """The state in the form that `update` expects; None if torch uses another kernel for such a group."""
    update: Callable[[Batch, list[Tensor], Columns, Tensor | None], None]
    is_elementwise: bool = True
    """Whether an element's update depends on no other element, so that shards can be updated by themselves."""


_adam_switches = itemgetter("foreach", "amsgrad", "capturable", "differentiable")
_adam_settings = itemgetter("lr", "betas", "weight_decay", "eps", "maximize", "decoupled_weight_decay")
_sgd_switches = itemgetter("foreach", "differentiable")
_sgd_settings = itemgetter("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize")
_step, _exp_avg, _exp_avg_sq = map(itemgetter, ("step", "exp_avg", "exp_avg_sq"))
_momentum_buffer = itemgetter("momentum_buffer")
_ONE = torch.ones(())


def _adam_columns(group: Group, states: list[State]) -> Columns | None:
    if group["fused"] is not True or type(group["lr"]) is not float or any(_adam_switches(group)):
        return None
    return [list(map(_step, states)), list(map(_exp_avg, states)), list(map(_exp_avg_sq, states))]


def _sgd_columns(group: Group, states: list[State]) -> Columns | None:
    if group["fused"] is not True or type(group["lr"]) is not float or any(_sgd_switches(group)):
        return None
    return [list(map(_momentum_buffer, states))] if group["momentum"] else []


def _muon_columns(group: Group, states: list[State]) -> Columns | None:
    return [list(map(_momentum_buffer, states))]


def _adam(batch: Batch, grads: list[Tensor], columns: Columns, found_inf: Tensor | None) -> None:
    steps, exp_avgs, exp_avg_sqs = columns
    lr, (beta1, beta2), weight_decay, eps, maximize, is_decoupled = _adam_settings(batch.group)
    if batch.device.type == "cpu":
        torch._foreach_add_(steps, _ONE, alpha=1)  # which does not create a tensor of 1 for each
    else:
        torch._foreach_add_(steps, 1)
    (torch._fused_adamw_ if is_decoupled else torch._fused_adam_)(
        batch.params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        steps,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=maximize,
        found_inf=found_inf,
    )
    if found_inf is not None:
        torch._foreach_sub_(steps, [found_inf] * len(steps))


def _sgd(batch: Batch, grads: list[Tensor], columns: Columns, found_inf: Tensor | None) -> None:
    weight_decay, momentum, lr, dampening, nesterov, maximize = _sgd_settings(batch.group)
    torch._fused_sgd_(
        batch.params,
        grads,
        columns[0] if columns else [],
        weight_decay=weight_decay,
        momentum=momentum,
        lr=lr,
        dampening=dampening,
        nesterov=nesterov,
        maximize=maximize,
        is_first_step=False,
        found_inf=found_inf,
    )


def _muon(batch: Batch, grads: list[Tensor], columns: Columns, found_inf: Tensor | None) -> None:
    if sharded_muon.PRECISION in batch.group:
        sharded_muon.update_whole(batch.params, grads, columns[0], batch.group)
        return
    settings = {name: value for name, value in batch.group.items() if name in _MUON_SETTINGS}
    torch_muon._single_tensor_muon(batch.params, grads, columns[0], has_complex=False, **settings)


_MUON_SETTINGS = frozenset(
    ("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "ns_steps", "eps", "adjust_lr_fn")
)
ADAM = Kernel(_adam_columns, _adam)
SGD = Kernel(_sgd_columns, _sgd)
MUON = Kernel(_muon_columns, _muon, is_elementwise=False)
KERNELS: dict[type, Kernel] = {
    torch.optim.AdamW: ADAM,
    torch.optim.Adam: ADAM,
    torch.optim.SGD: SGD,
    torch.optim.Muon: MUON,
    sharded_muon.Float32Muon: MUON,
}
"""The kernel of each of torch's optimizers, and of ours."""
