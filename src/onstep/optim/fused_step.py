"""Runs torch's fused AdamW, Adam and SGD, and its Muon, without the overhead of `Optimizer.step`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import repeat
from operator import attrgetter, is_, is_not
from typing import Any

import torch
import torch.optim.optimizer as torch_optimizer
from torch import Tensor
from torch.autograd import profiler
from torch.nn import Parameter
from torch.utils import _contextlib as torch_contextlib

from onstep.distributed.shards import as_dtensor, is_sharded
from onstep.errors import warn_once
from onstep.optim import sharded_muon
from onstep.optim.kernels import KERNELS, Batch, Columns, Group, Kernel, State, shards

logger = logging.getLogger(__name__)

grad_of: Callable[[Tensor], Tensor | None] = attrgetter("grad")
_FUSED_DEVICES = ("cpu", "cuda")
_FUSABLE = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)
_KNOWN_FILES = (os.path.dirname(torch_optimizer.__file__), torch_contextlib.__file__, sharded_muon.__file__)
_step_whole_matrices = torch.optim.Optimizer.profile_hook_step(sharded_muon.step)
"""The step of Muon in shards with the hooks of the optimizer, as torch's own step has them."""


class FusedStep:
    """Does the same as `optimizer.step()`, with torch's own kernels, on lists that are kept from step to step.

    The bits and the state are torch's. Unsupported cases are left to `optimizer.step()`: other optimizers and
    subclasses, hooks, a replaced `step`, a running profiler (whose trace names the step), other subclasses of tensors,
    a learning rate that is a tensor, and `amsgrad`, `capturable`, `differentiable` and `foreach`. Groups, settings,
    state and gradients may change between two calls.

    Of DTensors the kernels of AdamW, Adam and SGD get this rank's shards, so that they may be mixed with plain
    parameters and be of several meshes, which torch's own step refuses for them.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._kernel = KERNELS.get(type(optimizer))
        self._steps: tuple[object, object] = (None, None)
        self._is_torchs = False
        self._groups: list[Group] = []
        self._members: list[list[Tensor]] = []
        self._states: list[State] = []
        self._idle: list[Tensor] = []
        """Parameters that had no gradient when the lists were built."""
        self._batches: list[Batch] = []
        self._is_possible = False

    def __call__(self) -> None:
        """Update the parameters that have a gradient."""
        optimizer, kernel = self._optimizer, self._kernel
        work = self._collect(kernel) if kernel is not None and self._is_plain() else None
        own = vars(optimizer)
        found_inf = own.get("found_inf")
        if kernel is None or work is None:
            self._let_torch(found_inf)
            return
        has_autograd = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # torch.no_grad() costs seven times as much
        try:
            for batch, grads, columns in work:
                if batch.is_sharded:
                    kernel.update(*shards(batch, grads, columns), found_inf)
                else:
                    kernel.update(batch, grads, columns, found_inf)
        finally:
            torch._C._set_grad_enabled(has_autograd)
        own["_opt_called"] = True  # tells a torch scheduler that it is called after a step

    def _let_torch(self, found_inf: Tensor | None) -> None:
        """Do torch's own step, in parts where its kernels refuse to do it at once.

        Its fused SGD cannot leave out, or add, a first momentum, and does not accept DTensors; and no fused or foreach
        kernel accepts plain tensors with DTensors, or several meshes.
        """
        optimizer = self._optimizer
        is_fused_sgd = type(optimizer) is torch.optim.SGD and any(group["fused"] for group in optimizer.param_groups)
        new = set(newcomers(optimizer) if is_fused_sgd or found_inf is not None else [])
        params = [param for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
        has_shards = is_sharded(params)
        if found_inf is not None and (new or has_shards):
            if found_inf.item():
                return
            vars(optimizer).pop("found_inf", None)
        if has_shards and isinstance(optimizer, torch.optim.Muon) and not self._steps_as_torch():
            warn_once(
                logger,
                f"{type(optimizer).__name__} has a step of its own: where it calls torch's, matrices in shards are not "
                f"updated as by one process; pass torch.optim.Muon itself, whose step hooks run",
            )
        elif has_shards and type(optimizer) is torch.optim.Muon:
            _step_whole_matrices(optimizer)
            vars(optimizer)["_opt_called"] = True
            return
        if has_shards and is_fused_sgd:
            with _unfused(optimizer):
                optimizer.step()
            return
        takes_all = any(group.get("fused") or group.get("foreach") for group in optimizer.param_groups)
        parts: dict[tuple[bool, object], list[Tensor]] = {}
        for param in params:
            mesh = getattr(as_dtensor(param), "device_mesh", None) if has_shards and takes_all else None
            parts.setdefault((is_fused_sgd and param in new, mesh), []).append(param)
        if len(parts) < 2 or not self.runs_only_torchs_code():
            optimizer.step()
            return
        for part in parts.values():
            own = set(part)
            with without_gradients([param for param in params if param not in own]):
                optimizer.step()

    def runs_only_torchs_code(self) -> bool:
        """Whether `optimizer.step()` runs no hook and no code of a user, and may therefore be called several times."""
        own = vars(self._optimizer)
        return self._steps_as_torch() and not (
            own["_optimizer_step_pre_hooks"]
            or own["_optimizer_step_post_hooks"]
            or torch_optimizer._global_optimizer_pre_hooks
            or torch_optimizer._global_optimizer_post_hooks
        )

    def _steps_as_torch(self) -> bool:
        """Whether the code of `optimizer.step` is torch's, apart from hooks."""
        return all(map(_is_torchs, (vars(self._optimizer).get("step"), type(self._optimizer).step)))

    def _is_plain(self) -> bool:
        """Whether `optimizer.step()` would do nothing but run kernels."""
        own = vars(self._optimizer)
        steps = own.get("step"), type(self._optimizer).step
        if steps != self._steps:
            self._steps, self._is_torchs = steps, all(map(_is_torchs, steps))
        return self._is_torchs and not (
            own["_optimizer_step_pre_hooks"]
            or own["_optimizer_step_post_hooks"]
            or torch_optimizer._global_optimizer_pre_hooks
            or torch_optimizer._global_optimizer_post_hooks
            or "grad_scale" in own
            or profiler._is_profiler_enabled
        )

    def _collect(self, kernel: Kernel) -> list[tuple[Batch, list[Tensor], Columns]] | None:
        """The arguments for the kernel; None if torch must do the step, for example to create the state."""
        if not self._is_current():
            self._survey()
        if not self._is_possible:
            return None
        work: list[tuple[Batch, list[Tensor], Columns]] = []
        for batch in self._batches:
            try:
                columns = kernel.columns(batch.group, batch.states)
            except KeyError:  # before the first step of a parameter
                return None
            if columns is None:
                return None
            grads: list[Any] = list(map(grad_of, batch.params))
            if not all(map(is_not, grads, repeat(None))):
                self._members = []  # forces new lists at the next step
                return None
            work.append((batch, grads, columns))
        return work

    def _is_current(self) -> bool:
        """Whether the lists still match the optimizer, except for gradients missing now. Compares identities."""
        groups, state = self._optimizer.param_groups, self._optimizer.state
        return (
            are_members(groups, self._members)
            and all(map(is_, groups, self._groups))
            and len(state) == len(self._states)
            and all(map(is_, state.values(), self._states))
            and not (self._idle and any(map(is_not, map(grad_of, self._idle), repeat(None))))
        )

    def _survey(self) -> None:
        """Build the lists again."""
        state, batches = self._optimizer.state, dict[tuple[int, torch.device, torch.dtype, bool], Batch]()
        self._groups = list(self._optimizer.param_groups)
        self._members = [list(group["params"]) for group in self._groups]
        params = [param for members in self._members for param in members]
        self._states = list(state.values())
        self._idle = [param for param in params if param.grad is None]
        self._is_possible = all(map(self._can_step, params))
        for place, group in enumerate(self._groups):
            for param in group["params"]:
                if param.grad is not None:
                    is_shard = as_dtensor(param) is not None
                    key = place, param.device, param.dtype, is_shard
                    batch = batches.setdefault(key, Batch(group, param.device, [], [], is_shard))
                    own = state.get(param, {})
                    batch.params.append(param)
                    batch.states.append({} if any(value is None for value in own.values()) else own)  # of an older SGD
        self._batches = list(batches.values())

    def _can_step(self, param: Tensor) -> bool:
        """Whether the kernel can update `param`, or of a DTensor this rank's shard by itself."""
        is_plain = type(param) in (Parameter, Tensor)
        return is_plain or (self._kernel is not None and self._kernel.is_elementwise and as_dtensor(param) is not None)


def are_members(groups: list[Group], members: list[list[Tensor]]) -> bool:
    """Whether the groups have exactly these parameters. Compares identities."""
    if len(groups) != len(members):
        return False
    for place, known in enumerate(members):
        params = groups[place]["params"]
        if len(params) != len(known) or not all(map(is_, params, known)):
            return False
    return True


def newcomers(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The parameters with a first gradient, for which the next step creates state."""
    state, new = optimizer.state, []
    for group in optimizer.param_groups:
        is_stateless = not group.get("momentum", True) and type(optimizer) is torch.optim.SGD
        for param in group["params"]:
            if param.grad is not None and not is_stateless:
                own = state.get(param)
                if not own or any(value is None for value in own.values()):
                    new.append(param)
    return new


@contextmanager
def without_gradients(params: list[Tensor]) -> Iterator[None]:
    """Hide the gradients of these parameters, which a step then leaves as they are."""
    grads = [param.grad for param in params]
    try:
        for param in params:
            param.grad = None
        yield
    finally:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad


@contextmanager
def _unfused(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let torch choose other kernels than its fused ones."""
    were_fused = [group["fused"] for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            group["fused"] = False
        yield
    finally:
        for group, was_fused in zip(optimizer.param_groups, were_fused, strict=True):
            group["fused"] = was_fused


def fuse(optimizer: torch.optim.Optimizer) -> None:
    """Make an AdamW, Adam or SGD that leaves the choice of kernels to torch use the fused ones, if they can be.

    They accept a flag on the device, and differ from torch's other kernels in the last bits.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    are_plain = all(
        (type(param) in (Parameter, Tensor) or as_dtensor(param) is not None)
        and param.is_floating_point()
        and param.device.type in _FUSED_DEVICES
        for param in params
    )
    if type(optimizer) not in _FUSABLE or not are_plain or not all(map(_is_open, optimizer.param_groups)):
        return
    for group in optimizer.param_groups:
        group["fused"] = True
    vars(optimizer)["_step_supports_amp_scaling"] = True  # as torch does for those that it makes fused
    for param in params:
        own = optimizer.state.get(param, {})
        if "step" in own:  # on the host, unless fused
            own["step"] = own["step"].to(param.device, torch.float32)


def _is_open(group: Group) -> bool:
    """Whether a group leaves the choice of kernels to torch, or has chosen fused ones."""
    is_chosen = group["fused"] is not None or group["foreach"] is not None
    settings = group["lr"], *group.get("betas", ())
    return group["fused"] is True or not (
        is_chosen
        or group.get("capturable")
        or group["differentiable"]
        or any(isinstance(one, Tensor) for one in settings)
    )


def _is_torchs(step: object) -> bool:
    """Whether `step` and all that is wrapped around it is torch's code, as the scheduler's counter is, or ours."""
    while step is not None:
        code = getattr(step, "__code__", None)
        if code is None or not code.co_filename.startswith(_KNOWN_FILES):
            return False
        step = getattr(step, "__wrapped__", None)
    return True
