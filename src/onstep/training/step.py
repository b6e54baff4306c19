"""One training step: forward and backward over its micro-batches, then one optimizer update."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from onstep.data import IteratorReader, StepBatches
from onstep.distributed import no_sync
from onstep.events.context import unwrap
from onstep.optim import TrainingOptimizer, finite_gate
from onstep.training.anomalies import watch_of
from onstep.training.culprits import StepInputs
from onstep.training.expert_steps import experts_of
from onstep.training.losses import (
    MicroLoss,
    StepLoss,
    Weight,
    as_scalar,
    at_least_one,
    backward_start,
    gradient_factor,
    local_sums,
    read_loss,
    reduce_step,
)
from onstep.training.micro_batches import MicroBatches as MicroBatches
from onstep.training.model_facts import facts_of
from onstep.training.model_parallel import agreed_update
from onstep.training.param_sync import zero_grad_buffers
from onstep.training.rerun_step import fresh_batches, validate_losses
from onstep.training.state import GlobalState
from onstep.training.telling import Teller


class TrainStepResult(NamedTuple):
    """What `train_step` returns, in Megatron Bridge's order."""

    loss_dict: dict[str, Tensor]
    """Reduced losses as 0-d device tensors."""
    skipped_iter: int
    """1 where the update was not applied."""
    should_checkpoint: bool
    should_exit: bool
    exit_code: int
    grad_norm: Weight | None
    """Global L2 norm before clipping; a device tensor of our optimizers."""
    num_zeros_in_grad: Tensor | int | None
    """Exact zeros among the gradients, where they are counted; an int64 device tensor of our optimizers."""

    def with_max_attention_logit(self, global_state: GlobalState) -> tuple[Any, ...]:
        """The 8 values that newer versions of Megatron Bridge return: these 7 and the largest attention logit of the
        step, a device tensor, or None unless `model.log_max_attention_logit`."""
        return (*self, global_state.max_attention_logit)


def train_step(
    forward_step_func: Callable[..., Any],
    data_iterator: Any,
    model: list[nn.Module],
    optimizer: Any,
    scheduler: Any,
    global_state: GlobalState,
    tell: Teller | None = None,
) -> TrainStepResult:
    """Run forward and backward over the step's micro-batches and apply one update. Collective.

    Args:
        forward_step_func: called as `(iterator, model chunk)`, its state already injected.
        data_iterator: the step's `StepBatches`, or any iterator of micro-batches to take `num_microbatches` from.
        model: list of model chunks; without pipelining there is one.
        optimizer: a `TrainingOptimizer`, or any object whose `step()` returns `(successful, grad_norm, num_zeros)`.
        scheduler: stepped when the update succeeded, by the samples of a whole step also where the tail of an epoch
            is shorter: the schedule is as long as the run. None keeps the learning rate.
        global_state: state of the run.
        tell: tells the moments inside the step; None tells nobody. With one, `loss_dict` is empty where nobody listens
            to `on_train_step_end`.
    """
    returns_losses = tell is None
    tell = tell or Teller(None, global_state)
    batches = step_batches(data_iterator, global_state.num_microbatches, global_state.world.size)
    scaler = global_state.loss_scaler(optimizer)
    loss_scale = None if scaler is None else scaler.scale
    watch = watch_of(global_state)
    if watch is not None:
        watch.begin_forward(StepInputs(forward_step_func, batches, model, tell, loss_scale))
    micros: list[MicroLoss] = []
    machine = global_state.rerun_state_machine
    while machine.should_run_forward_backward():
        clear_gradients(model, optimizer, global_state)
        given = fresh_batches(batches) if machine.is_enabled else batches
        with global_state.timers("forward-backward"), global_state.nvtx("forward-backward"):
            micros = forward_backward(forward_step_func, given, model, global_state, tell, loss_scale)
        validate_losses(machine, micros, global_state.cfg.rerun_state_machine)
    should_checkpoint, should_exit, exit_code = machine.should_checkpoint_and_exit()
    if should_exit:
        return TrainStepResult({}, 1, should_checkpoint, True, exit_code, None, None)
    step_loss = reduce_step(micros, global_state.world)
    factor = gradient_factor(step_loss, micros, global_state.nominal_step_size, global_state.world.size)
    memory_level = global_state.cfg.train.empty_unused_memory_level
    if memory_level >= 1:
        empty_unused_memory()
    with global_state.timers("optimizer"), global_state.nvtx("optimizer"):
        successful, grad_norm, num_zeros = update(model, optimizer, factor, step_loss, tell)
    experts = global_state.experts
    if experts is not None and experts.is_active:
        experts.end_step(global_state.world, updates_biases=successful)
    global_state.last_step_loss, global_state.last_micros = step_loss, micros
    if successful and scheduler is not None:
        scheduler.step(schedule_increment(batches, global_state))
    if memory_level >= 2:
        empty_unused_memory()
    if tell.on.on_train_metrics:
        loss, tokens = local_metrics(micros)
        tell("on_train_metrics", loss=loss, grad_norm=grad_norm, tokens=tokens)
    # a tensor operation, which the loop can do without where nobody is told
    losses = loss_dict(step_loss) if returns_losses or tell.on.on_train_step_end else {}
    return TrainStepResult(losses, int(not successful), False, False, 0, grad_norm, num_zeros)


def step_batches(data_iterator: Any, num_microbatches: int, world_size: int = 1) -> StepBatches:
    """The step's micro-batches, read now if they come as an iterator; fewer where it ends within the step.

    Raises:
        StopIteration: when the iterator is exhausted.
    """
    if isinstance(data_iterator, StepBatches):
        return data_iterator
    source = data_iterator[0] if isinstance(data_iterator, list) else data_iterator
    batches = IteratorReader(source, world_size=world_size).read(num_microbatches)
    if batches is None:
        raise StopIteration
    return batches


def samples_of(batches: StepBatches, state: GlobalState) -> int:
    """Samples of a step over all ranks; the configured number where the data does not tell."""
    return batches.num_samples if batches.num_samples is not None else state.current_running_global_batch_size


def schedule_increment(batches: StepBatches, state: GlobalState) -> int:
    """Samples that the schedule moves on by: those of a whole step, where the configuration says what that is."""
    if state.cfg.train.global_batch_size is None:
        return samples_of(batches, state)
    return state.current_running_global_batch_size


def clear_gradients(model: list[nn.Module], optimizer: Any, state: GlobalState) -> None:
    """Forget the last step's gradients, also in the buffers of chunks that have their own."""
    zero_grad_buffers(model)
    optimizer.zero_grad()
    if state.forward_pre_hooks is not None:
        state.forward_pre_hooks.copy_main_params()


def empty_unused_memory() -> None:
    """Give the device's unused memory back to others; the CPU has none of the kind."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def forward_backward(
    forward_step_func: Callable[..., Any],
    batches: StepBatches,
    model: list[nn.Module],
    state: GlobalState,
    tell: Teller,
    loss_scale: float | None = None,
) -> list[MicroLoss]:
    """Forward and backward of each micro-batch; data-parallel communication happens with the last.

    Gradients are those of the loss times `loss_scale`; the losses themselves are not scaled.
    """
    iterator = MicroBatches(batches, state.world.device)
    weighting = state.cfg.train.loss_weighting
    last = len(iterator) - 1
    alone, nominal = last == 0 and state.world.size == 1, state.nominal_step_size
    experts = experts_of(state, model)
    if experts is not None:
        experts.begin_step()
    forward_timer, backward_timer = state.timers("forward-compute"), state.timers("backward-compute")
    straggler_timer = state.straggler_timer
    # a user's model may keep one unasked
    watches_logits = state.cfg.model.log_max_attention_logit or facts_of(state, model).logs_attention_logit
    micros, logits = [], []
    for index in range(last + 1):
        batch = iterator.stage(index)
        if experts is not None:
            experts.begin_micro_batch(batches.is_filler[index])
        if tell.on.on_forward_backward_start:
            tell("on_forward_backward_start", micro_batch=batch)
        with no_sync(model) if index < last else nullcontext():
            with forward_timer, straggler_timer, state.autocast():
                output, loss_function = forward_step_func(iterator, model[0])
                micro = read_loss(loss_function(output), batch, weighting, batches.is_filler[index])
            start = backward_start(micro, alone, nominal, state.world.size, loss_scale)
            if experts is not None:
                experts.before_backward(micro, start, len(iterator) * state.world.size)
            with backward_timer:
                micro.backward(start)
        del output, loss_function
        micro.loss = micro.loss.detach()
        if watches_logits:
            logits.append(getattr(unwrap(model[0]), "max_attention_logit", None))
        micros.append(micro)
        if tell.on.on_forward_backward_end:
            tell("on_forward_backward_end", micro_batch=batch, loss=local_metrics([micro])[0])
        if index < last and tell.on.on_substep_end:
            tell("on_substep_end")
    state.max_attention_logit = largest_logit(logits, state) if watches_logits else None
    return micros


def largest_logit(logits: list[Tensor | None], state: GlobalState) -> Tensor | None:
    """The largest attention logit of some micro-batches over all ranks; None of a model that does not tell.

    Collective.
    """
    known = [logit for logit in logits if logit is not None]
    return state.world.max(torch.stack(known).max()) if known else None


def update(
    model: list[nn.Module], optimizer: Any, factor: Weight | None, step_loss: StepLoss, tell: Teller
) -> tuple[bool, Weight | None, Tensor | int | None]:
    """Apply one update: `(successful, gradient norm before clipping, number of zero gradients)`.

    Whatever is not finite is not applied. A step whose float16 gradients overflowed has no norm. Collective where
    several ranks hold parts of the model, which then see the same.
    """
    one_update = update_ours if isinstance(optimizer, TrainingOptimizer) else update_foreign
    successful, grad_norm, num_zeros = one_update(model, optimizer, factor, step_loss, tell)
    group = facts_of(tell.state, model).model_parallel_group
    if group is not None:
        result = successful, grad_norm, num_zeros
        successful, grad_norm, num_zeros = agreed_update(result, group, tell.state.cfg.train)
    if tell.on.on_optimizer_step:
        tell("on_optimizer_step", grad_norm=grad_norm)
    return successful, grad_norm, num_zeros


def update_ours(
    model: list[nn.Module], optimizer: TrainingOptimizer, factor: Weight | None, step_loss: StepLoss, tell: Teller
) -> tuple[bool, Weight | None, Tensor | int | None]:
    """In halves, so that `on_pre_optimizer_step` sees clipped gradients.

    The host need not wait for the device, but with a loss scaler or `optimizer.grad_norm_skip_threshold`, each of which
    reads it once. The anomaly gate judges a step before that threshold does.
    """
    optimizer.observe_loss(step_loss.numerator)
    norm = optimizer.prepare(factor)
    grad_norm = None if optimizer.overflowed else norm
    if tell.on.on_pre_optimizer_step:
        tell("on_pre_optimizer_step", grad_norm=grad_norm)
    if not is_admitted(tell.state, step_loss, grad_norm):
        return False, grad_norm, optimizer.num_zeros
    return optimizer.apply(), grad_norm, optimizer.num_zeros


def update_foreign(
    model: list[nn.Module], optimizer: Any, factor: Weight | None, step_loss: StepLoss, tell: Teller
) -> tuple[bool, Weight | None, Tensor | int | None]:
    """Loss and raw gradients are read once before `step()`, which waits for the device; then it clips by itself.

    Of float16 it knows nothing: its gradients are unscaled, and a step that overflowed is skipped before it.
    """
    scaler = tell.state.foreign_scaler
    if scaler is not None:
        factor = (1.0 if factor is None else factor) / scaler.scale
    scale_gradients(model, factor)
    overflowed = scaler is not None and scaler.is_overflow(gradient_norm(model, step_loss), step_loss.numerator)
    is_finite = not overflowed and watch_gradients(tell.state, model, step_loss)
    if tell.on.on_pre_optimizer_step:
        tell("on_pre_optimizer_step")
    most = tell.state.cfg.optimizer.grad_norm_skip_threshold
    takes_norm = not overflowed and (most is not None or looks_for_spikes(tell.state))
    norm = gradient_norm(model, step_loss) if takes_norm else None
    if not is_admitted(tell.state, step_loss, norm) or not is_finite:
        return False, None, None
    if most is not None and norm is not None and norm > most:
        return False, norm, None
    successful, grad_norm, num_zeros = optimizer.step()
    return bool(successful), grad_norm, num_zeros


def is_admitted(state: GlobalState, step_loss: StepLoss, grad_norm: Weight | None) -> bool:
    """Whether the anomaly gate lets this update through: the same on all ranks. Collective where callbacks may ask."""
    watch = watch_of(state)
    return watch is None or watch.admits(step_loss, grad_norm)


def looks_for_spikes(state: GlobalState) -> bool:
    """Whether the anomaly gate wants the gradient norm of each step."""
    watch = watch_of(state)
    return watch is not None and watch.looks_for_spikes


def scale_gradients(model: list[nn.Module], factor: Weight | None) -> None:
    """Multiply all gradients, for an optimizer that cannot fold the factor into its own clipping."""
    gradients = _gradients(model)
    if factor is not None and gradients:
        torch._foreach_mul_(gradients, factor)


def watch_gradients(state: GlobalState, model: list[nn.Module], step_loss: StepLoss) -> bool:
    """Whether loss and gradients are finite, for an optimizer that does not ask. Waits for the device."""
    if state.gate is None:
        state.gate = finite_gate(state.world.device)
    state.gate.observe_loss(step_loss.numerator)
    if _gradients(model):
        state.gate.observe_norm(gradient_norm(model, step_loss))
    return state.gate.poll(force=True) is None


def gradient_norm(model: list[nn.Module], step_loss: StepLoss) -> Tensor:
    """The L2 norm of all gradients, 0-d; 0 where there are none, on the loss's device."""
    gradients = _gradients(model)
    if not gradients:
        return torch.zeros((), device=step_loss.numerator.device)
    norm: Tensor = torch.stack(torch._foreach_norm(gradients)).norm()
    return norm


def _gradients(model: list[nn.Module]) -> list[Tensor]:
    """The gradients of all chunks, a shared parameter's once."""
    parameters = dict.fromkeys(p for chunk in model for p in chunk.parameters())
    return [p.grad for p in parameters if p.grad is not None]


def local_metrics(micros: list[MicroLoss]) -> tuple[Tensor, Tensor | None]:
    """This rank's mean loss and number of labels over some micro-batches, as device tensors."""
    numerator, weight, tokens = local_sums(micros)
    loss = numerator if micros[0].kind == "share" else numerator / at_least_one(weight)
    return loss, None if tokens is None else as_scalar(tokens, torch.int64, loss.device)


def loss_dict(step_loss: StepLoss) -> dict[str, Tensor]:
    """The reduced losses by name: what the forward step reported, else the loss itself as `lm loss`."""
    return step_loss.reports or {"lm loss": step_loss.value()}
