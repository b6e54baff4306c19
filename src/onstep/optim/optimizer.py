"""Wraps a torch optimizer with the global norm, clipping and finite gate that a training step requires."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from onstep.distributed.block_norms import norms_of
from onstep.distributed.pipeline.sums import StageSums
from onstep.distributed.shards import is_sharded
from onstep.errors import CheckpointError, ConfigError
from onstep.optim.divisible import check_divisible
from onstep.optim.finite_gate import FiniteGate, HostFiniteGate, finite_gate, is_above
from onstep.optim.fused_step import are_members
from onstep.optim.gated_step import GatedStep
from onstep.optim.gradient_scaling import clip_factor, like, multiply
from onstep.optim.gradients import ShardedGradients
from onstep.optim.loss_scaler import LossScaler
from onstep.optim.quantized_state import as_plain, from_plain
from onstep.optim.zero_counts import count_zeros

_LOW_PRECISION = (torch.float16, torch.bfloat16)


class TrainingOptimizer:
    """Any `torch.optim.Optimizer`, in two halves: `prepare` the gradients, `apply` the update.

    An update is applied only if every gradient norm (and observed loss) was finite. On an accelerator the host does not
    wait to know that: torch's fused optimizers and `MuonWithAdamW` accept the gate's flag on the device, and torch's
    other optimizers are guarded (`GuardedStep`). AdamW, Adam and SGD are made fused if they leave that choice to torch.
    For an optimizer of another package, whose state may be anywhere, for one whose steps run hooks, and for the first
    update of each, the flag is read before the update.

    With a `scaler`, the gradients are assumed to be those of the loss times `scaler.scale`: `prepare` unscales them,
    reads once whether they overflowed, and if so skips the step without closing the gate; see `LossScaler` for the
    difference between an overflow and an anomaly. The scaler's state is in `state_dict` as `scaler`.

    Args:
        clip_grad: maximum global L2 norm of the gradients; None or 0 disables clipping.
        gate: the gate to use; None creates one for the device of the first parameter.
        order: parameters in the order in which their gradients enter the global norm, which affects its last bits; None
            means the order of the groups.
        scaler: the loss scaler of mixed precision; None does not scale.
        grad_norm_skip_threshold: a step whose gradient norm before clipping is above this updates nothing. The host,
            which has the schedule, must know this, so each update waits for an accelerator, unless `read` has. None
            disables skipping.
        log_num_zeros_in_grad: count the zeros in the gradients of each step, after clipping, as `num_zeros`.
        optimizer: the optimizer.

    Raises:
        ConfigError: if `clip_grad` is negative, `grad_norm_skip_threshold` is not > 0, the optimizer requires a
            closure, or float16 weights are combined with a scaler.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        clip_grad: float | None = 1.0,
        gate: FiniteGate | None = None,
        order: list[Parameter] | None = None,
        scaler: LossScaler | None = None,
        grad_norm_skip_threshold: float | None = None,
        log_num_zeros_in_grad: bool = False,
    ) -> None:
        if clip_grad is not None and not clip_grad >= 0:
            raise ConfigError(f"clip_grad must be > 0, got {clip_grad}; pass None or 0 for no clipping")
        if grad_norm_skip_threshold is not None and not grad_norm_skip_threshold > 0:
            raise ConfigError(
                f"grad_norm_skip_threshold must be > 0, got {grad_norm_skip_threshold}; pass None to skip no step"
            )
        check_closure(type(optimizer))
        check_divisible(optimizer)
        self.optimizer = optimizer
        self.clip_grad = clip_grad
        self.grad_norm_skip_threshold = grad_norm_skip_threshold
        self.log_num_zeros_in_grad = log_num_zeros_in_grad
        self._order = list(order or [])
        if gate is None:
            gate = finite_gate(next(param.device for group in optimizer.param_groups for param in group["params"]))
        self.gate = gate
        self._step = GatedStep(optimizer, gate)
        # torch's own zero_grad spends most of its time on profiling; a subclass may override it.
        self._clears_plainly = type(optimizer).zero_grad is torch.optim.Optimizer.zero_grad
        self._observed_loss: Tensor | None = None
        self.overflowed = False
        """Whether the gradients of the last prepared step overflowed, which skips its update."""
        self.num_zeros: Tensor | None = None
        """Zeros in the gradients of the last prepared step, 0-d int64 on their device, if they are counted and did not
        overflow."""
        self._norm: Tensor | None = None
        self._norm_value: float | None = None
        """The same on the host, if it has been read."""
        self._scaler = scaler
        self._stages: StageSums | None = None
        self._survey()

    @property
    def grad_norm(self) -> Tensor | None:
        """The last result of `prepare`; None if those gradients overflowed."""
        return None if self.overflowed else self._norm

    @property
    def scaler(self) -> LossScaler | None:
        """The loss scaler; assign it only between two steps."""
        return self._scaler

    @scaler.setter
    def scaler(self, scaler: LossScaler | None) -> None:
        if scaler is not None:
            check_scalable(self._params)
        self._scaler, self.overflowed, self._observed_loss = scaler, False, None

    def get_loss_scale(self) -> Tensor:
        """The current loss scale in Megatron-Core's form, (1,) on the host; 1 without a scaler."""
        return torch.tensor([1.0 if self._scaler is None else self._scaler.scale])

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the wrapped optimizer."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        """The state of the wrapped optimizer, by parameter."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:
        """The defaults of the wrapped optimizer's groups."""
        return self.optimizer.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, or fill them with zeros.

        Args:
            set_to_none: whether gradients are removed, which frees their memory.
        """
        if not (set_to_none and self._clears_plainly):
            self.optimizer.zero_grad(set_to_none=set_to_none)
            return
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                param.grad = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer.

        Args:
            param_group: the parameter group: `params` and its settings.
        """
        self.optimizer.add_param_group(param_group)
        self._survey()

    def state_dict(self) -> dict[str, Any]:
        """The state of the wrapped optimizer, and the scaler's as `scaler`; the gate is not included."""
        self._step.settle()
        state = as_plain(self.optimizer.state_dict())
        return state if self._scaler is None else {**state, "scaler": self._scaler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state into the wrapped optimizer and the scaler.

        If it has no scaler state, as after a run without float16, a scaler starts from scratch; without a scaler, a
        scaler state is ignored.

        Raises:
            CheckpointError: if the scaler's state is invalid, or the groups differ.
        """
        state = dict(state_dict)
        scaler_state = state.pop("scaler", None)
        groups = (self.param_groups, state.get("param_groups", []))
        sizes, saved_sizes = ([len(group["params"]) for group in of_one] for of_one in groups)
        if sizes != saved_sizes:  # Adam's moments would be assigned to the wrong parameters
            raise CheckpointError(
                f"the optimizer has groups of {sizes} parameters, but its saved state those of {saved_sizes}; resume "
                f"with the saved optimizer.param_groups, with optimizer.decoupled_lr set only if it was, and with the "
                f"same parameters frozen, or load without the optimizer (checkpoint.load_optim=false)"
            )
        self.optimizer.load_state_dict(from_plain(state))
        if self._scaler is not None:
            self._scaler.reset()
            if scaler_state is not None:
                self._scaler.load_state_dict(scaler_state)
        self._survey()

    def observe_loss(self, loss: Tensor) -> None:
        """Close the gate if `loss`, a tensor of one element, is not finite; see `FiniteGate.observe_loss`.

        If values are in host memory, `prepare` checks the loss together with the gradients.
        """
        self._observed_loss = loss
        if not self._is_on_host:
            self.gate.observe_loss(loss)

    def prepare(self, grad_scale: Tensor | float | None = None, *, needs_norm: bool = True) -> Tensor | None:
        """Scale the gradients, compute their global norm, clip them and pass the norm to the gate.

        Without `grad_scale` the gradients afterwards are, bit for bit, those of `torch.nn.utils.clip_grad_norm_`,
        except that norms of float16 and bfloat16 gradients are accumulated in float32, and those of large gradients on
        a CPU by blocks (`norms_of`).

        Args:
            grad_scale: factor > 0 for all gradients, a number or a 0-d tensor, without an extra pass; None is 1.
            needs_norm: whether the caller uses the norm. If not, and if neither clipping, a scaler nor
                `grad_norm_skip_threshold` needs it, the gate checks the gradients instead, which only reads them (and
                on a CPU costs a third of a norm). Gradients that are finite, but whose norm would overflow, are then
                applied.

        Returns:
            The L2 norm of the scaled gradients before clipping, 0-d on their device; the host waits for it only with a
            scaler that is not constant. It is not finite if gradients overflowed, and None if it was not computed.
        """
        if not are_members(self.optimizer.param_groups, self._members):
            self._survey()
        has_autograd = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            if self._sharded is None:
                grads = [grad for param in self._ordered if (grad := param.grad) is not None]
            else:
                grads = self._sharded.collect()
            is_norm_used = needs_norm or self.clip_grad or self._scaler or self.grad_norm_skip_threshold
            self._norm_value = None
            if is_norm_used or not grads or not self._can_look_through:
                self._norm = self._scale_and_clip(grads, grad_scale)
            else:
                self._norm, loss = None, self._observed_loss
                if grad_scale is not None:
                    factor = like(torch.empty((), dtype=self._wide, device=self._device), grad_scale)
                    multiply(grads, factor, spans_devices=False)
                self.gate.observe_gradients([*grads, loss] if self._is_on_host and loss is not None else grads)
            self._observed_loss = None
            if self.log_num_zeros_in_grad:
                kinds = None if self._sharded is None else self._sharded.kinds
                self.num_zeros = None if self.overflowed else count_zeros(self._ordered, self._device, kinds)
                if self._stages is not None and self.num_zeros is not None:
                    self.num_zeros = self._stages(self.num_zeros.reshape(1)).reshape(())
        finally:
            torch._C._set_grad_enabled(has_autograd)
        return self._norm

    def read(self, *values: Tensor) -> list[float]:
        """The values of tensors of one element, with one wait for an accelerator, after which `apply` does not wait.

        Args:
            values: tensors of one element on the device.
        """
        reads_norm = self.grad_norm_skip_threshold is not None and self._norm is not None and self._norm_value is None
        if not reads_norm or self._norm is None:
            return self.gate.read(*values)
        *known, self._norm_value = self.gate.read(*values, self._norm)
        return known

    def apply(self) -> bool:
        """Update the weights, unless the gate is closed or the norm is above `grad_norm_skip_threshold`.

        Returns:
            False if the host knows that nothing was updated. If the gate on an accelerator is closed but the host does
            not know yet, the result is True although the device updated nothing; `gate.poll` reports it at most 10
            steps later.
        """
        if self.overflowed or self.gate.first_bad_step is not None:
            return False
        if self._step.must_read or self.grad_norm_skip_threshold is not None:
            self.read()
            if self.gate.first_bad_step is not None:
                return False
            if is_above(self.grad_norm_skip_threshold, self._norm, self._norm_value):
                return False
        self._step.run()
        return True

    def step(self) -> tuple[bool, Tensor | None, Tensor | None]:
        """Run both halves, with Megatron-Core's result: (update_successful, grad_norm, num_zeros).

        The gate counts these calls as steps, unless `gate.begin_step` sets the step. Zeros that are not counted are
        None. A step that overflowed has no norm: (False, None, None).
        """
        self.prepare()
        is_applied = self.apply()
        self.gate.begin_step(self.gate.step + 1)
        return is_applied, self.grad_norm, self.num_zeros

    def join(self) -> None:
        """Use the process groups of this training, where an earlier one had others."""
        self._survey()

    def sum_over_stages(self, group: ProcessGroup) -> None:
        """From now on, compute norms and zeros over the stages of a pipeline too. Each `prepare` is collective.

        A parameter marked as `shared` is counted by the rank that shares it.

        Args:
            group: the ranks of the pipeline.
        """
        self._stages = StageSums(group)
        self._survey()

    def _survey(self) -> None:
        """Cache what prepare and apply need to know about the parameters, instead of checking at every step."""
        self._members = [list(group["params"]) for group in self.optimizer.param_groups]
        params = self._params = [param for members in self._members for param in members]
        self._is_on_host = isinstance(self.gate, HostFiniteGate)
        if self._scaler is not None:
            check_scalable(params)
        rank: dict[Tensor, int] = {param: place for place, param in enumerate(self._order)}
        self._ordered = sorted(params, key=lambda param: rank.get(param, len(rank)))
        dtypes = {param.dtype for param in params}
        has_low_precision = not dtypes.isdisjoint(_LOW_PRECISION)
        self._wide = torch.float64 if torch.float64 in dtypes else torch.float32
        self._norm_dtype = self._wide if has_low_precision else None
        self._device = params[0].device
        self._spans_devices = any(param.device != self._device for param in params)
        in_parts = self._stages is not None or is_sharded(params)
        self._sharded = ShardedGradients(self._ordered) if in_parts else None
        self._can_look_through = (
            self._stages is None
            and not self._spans_devices
            and self._device.type in ("cpu", "cuda")
            and all(type(param) in (Tensor, Parameter) and param.is_floating_point() for param in params)
        )
        """Whether the gate can check the gradients themselves."""
        self._step.survey(spans_devices=self._spans_devices)

    def _scale_and_clip(self, grads: list[Tensor], grad_scale: Tensor | float | None) -> Tensor:
        """Scale and clip the gradients and pass their norm to the gate. Returns the norm before clipping."""
        if self._is_on_host and self._observed_loss is not None:
            self.gate.observe_loss(self._observed_loss)
        raw_norm = norm = self._global_norm(grads)
        if self._scaler is not None:
            grad_scale = like(norm, 1.0 if grad_scale is None else grad_scale) / self._scaler.scale
        if grad_scale is not None:
            grad_scale = like(norm, grad_scale)
            norm = norm * grad_scale
        if self._scaler is not None:
            self._look_for_overflow(self._scaler, raw_norm, norm)
        coefficient = grad_scale
        if not self.overflowed:  # else the gate stays open: a lower scale will fix it
            self._norm_value = self.gate.observe_norm(norm, self._norm_value)
            coefficient = clip_factor(self.clip_grad, norm, self._norm_value, grad_scale)
        if coefficient is not None and grads:
            multiply(grads, coefficient, spans_devices=self._spans_devices)
        return norm

    def _look_for_overflow(self, scaler: LossScaler, raw_norm: Tensor, norm: Tensor) -> None:
        """Note whether the step overflowed, which may change the scale. Reads the norm unless the scale is constant."""
        self.overflowed = False
        if not scaler.is_constant:
            losses = [] if self._observed_loss is None else [self._observed_loss]
            self._norm_value, raw, *known = self.gate.read(norm, raw_norm, *losses)
            self.overflowed = scaler.is_overflow(raw, *known)

    def _global_norm(self, grads: list[Tensor]) -> Tensor:
        """The L2 norm over all `grads`, and over those of other ranks if they are sharded, 0-d."""
        if self._stages is not None and self._sharded is not None:
            return self._stages.norm(self._sharded.square(grads, self._device)).to(self._wide)
        if self._sharded is not None and self._sharded.kinds.sums.has_others:
            return self._sharded.norm(grads, self._device)
        if not grads:
            return torch.zeros((), device=self._device)
        norms = norms_of(grads, self._norm_dtype)
        if self._spans_devices:
            norms = [norm.to(self._device) for norm in norms]
        norm: Tensor = torch.linalg.vector_norm(torch.stack(norms), 2.0)
        return norm


def check_scalable(params: Iterable[Tensor]) -> None:
    """Refuse (ConfigError) parameters whose gradients a loss scale cannot be taken out of.

    Args:
        params: the parameters of a model or an optimizer.
    """
    if any(param.dtype is torch.float16 and param.requires_grad for param in params):
        raise ConfigError(
            "float16 mixed precision requires float32 weights, got a parameter of torch.float16, whose gradient would "
            "be rounded again when unscaled; load the model in float32 (model.float()), or train in bfloat16"
        )


def check_closure(kind: type[torch.optim.Optimizer]) -> None:
    """Refuse (ConfigError) an optimizer whose `step` computes the loss again.

    Args:
        kind: the class of the optimizer.
    """
    given = list(inspect.signature(kind.step).parameters.values())[1:2]
    is_required = any(one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD for one in given)
    if issubclass(kind, torch.optim.LBFGS) or is_required:
        raise ConfigError(f"{kind.__name__} requires a closure, which a training step does not have; use AdamW or SGD")
