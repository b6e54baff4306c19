"""One training step: forward and backward over its micro-batches, then one optimizer update."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from onstep.data import StepBatches
from onstep.distributed import no_sync
from onstep.optim import TrainingOptimizer
from onstep.training.devices import to_device
from onstep.training.losses import (
    MicroLoss,
    StepLoss,
    Weight,
    backward_start,
    gradient_factor,
    read_loss,
    reduce_step,
)
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
    grad_norm: Tensor | None
    """Global L2 norm before clipping."""
    num_zeros_in_grad: int | None


class MicroBatches(Iterator[Any]):
    """A step's micro-batches as the forward step sees them; each is moved to the device right before its turn."""

    def __init__(self, batches: StepBatches, device: torch.device) -> None:
        self.batches = batches
        self.device = device
        self.items: dict[str, Any] = {}
        """What a forward step wants to remember from one micro-batch of the step to the next."""
        self._next = 0
        self._staged: tuple[int, Any] | None = None

    def __len__(self) -> int:
        return len(self.batches.micro_batches)

    def is_filler(self) -> bool:
        """Whether the micro-batch that was handed out last must count as zero."""
        return bool(self.batches.is_filler[self._next - 1])

    def stage(self, index: int) -> Any:
        """Move micro-batch `index` to the device; the next `next()` returns it."""
        batch = to_device(self.batches.micro_batches[index], self.device)
        self._staged = (index, batch)
        self._next = index
        return batch

    def __next__(self) -> Any:
        index = self._next
        if index >= len(self):
            raise StopIteration
        self._next = index + 1
        staged = self._staged
        return staged[1] if staged is not None and staged[0] == index else self.stage_and_pass(index)

    def stage_and_pass(self, index: int) -> Any:
        """Move a micro-batch that a forward step reads beyond its own."""
        batch = self.stage(index)
        self._next = index + 1
        return batch


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
        scheduler: stepped by the number of samples when the update succeeded.
        global_state: state of the run.
        tell: tells the moments inside the step; None tells nobody.
    """
    tell = tell or Teller(None, global_state)
    batches = step_batches(data_iterator, global_state.num_microbatches)
    optimizer.zero_grad()
    micros = forward_backward(forward_step_func, batches, model, global_state, tell)
    step_loss = reduce_step(micros, global_state.world)
    factor = gradient_factor(step_loss, micros, nominal_weight(global_state, micros), global_state.world.size)
    successful, grad_norm, num_zeros = update(model, optimizer, factor, step_loss, tell)
    global_state.last_step_loss, global_state.last_micros = step_loss, micros
    if successful:
        scheduler.step(samples_of(batches, global_state))
    if tell.on.on_train_metrics:
        loss, tokens = local_metrics(micros)
        tell("on_train_metrics", loss=loss, grad_norm=grad_norm, tokens=tokens)
    return TrainStepResult(loss_dict(step_loss), int(not successful), False, False, 0, grad_norm, num_zeros)


def step_batches(data_iterator: Any, num_microbatches: int) -> StepBatches:
    """The step's micro-batches, read now if they come as an iterator.

    Raises:
        StopIteration: when the iterator is exhausted.
    """
    if isinstance(data_iterator, StepBatches):
        return data_iterator
    source = data_iterator[0] if isinstance(data_iterator, list) else data_iterator
    micro_batches = [next(source) for _ in range(num_microbatches)]
    return StepBatches(micro_batches, None, None, [False] * num_microbatches)


def samples_of(batches: StepBatches, state: GlobalState) -> int:
    """Samples of a step over all ranks; the configured number where the data does not tell."""
    return batches.num_samples if batches.num_samples is not None else state.cfg.train.global_batch_size or 1


def forward_backward(
    forward_step_func: Callable[..., Any],
    batches: StepBatches,
    model: list[nn.Module],
    state: GlobalState,
    tell: Teller,
) -> list[MicroLoss]:
    """Forward and backward of each micro-batch; data-parallel communication happens with the last."""
    iterator = MicroBatches(batches, state.world.device)
    weighting = state.cfg.train.loss_weighting
    last = len(iterator) - 1
    alone = last == 0 and state.world.size == 1
    micros = []
    for index in range(last + 1):
        batch = iterator.stage(index)
        if tell.on.on_forward_backward_start:
            tell("on_forward_backward_start", micro_batch=batch)
        with no_sync(model) if index < last else nullcontext():
            with state.autocast():
                output, loss_function = forward_step_func(iterator, model[0])
                micro = read_loss(loss_function(output), batch, weighting, batches.is_filler[index])
            micro.backward(backward_start(micro, alone, nominal_weight(state, [micro]), state.world.size))
        del output, loss_function
        micro.loss = micro.loss.detach()
        micros.append(micro)
        if tell.on.on_forward_backward_end:
            tell("on_forward_backward_end", micro_batch=batch, loss=local_metrics([micro])[0])
        if index < last and tell.on.on_substep_end:
            tell("on_substep_end")
    return micros


def nominal_weight(state: GlobalState, micros: list[MicroLoss]) -> float:
    """About the weight of a whole step, the same on all ranks: keeps summed losses of order 1."""
    return state.nominal_step_size if micros[0].tokens is not None else 1.0


def update(
    model: list[nn.Module], optimizer: Any, factor: Weight | None, step_loss: StepLoss, tell: Teller
) -> tuple[bool, Tensor | None, int | None]:
    """Apply one update: `(successful, gradient norm before clipping, number of zero gradients)`."""
    if isinstance(optimizer, TrainingOptimizer):
        optimizer.observe_loss(step_loss.numerator)
        grad_norm = optimizer.prepare(factor)
        if tell.on.on_pre_optimizer_step:
            tell("on_pre_optimizer_step", grad_norm=grad_norm)
        successful, num_zeros = optimizer.apply(), None
    else:
        scale_gradients(model, factor)
        if tell.on.on_pre_optimizer_step:
            tell("on_pre_optimizer_step")
        successful, grad_norm, num_zeros = optimizer.step()
    if tell.on.on_optimizer_step:
        tell("on_optimizer_step", grad_norm=grad_norm)
    return successful, grad_norm, num_zeros


def scale_gradients(model: list[nn.Module], factor: Weight | None) -> None:
    """Multiply all gradients, for an optimizer that cannot fold the factor into its own clipping."""
    if factor is None:
        return
    gradients = [p.grad for chunk in model for p in chunk.parameters() if p.grad is not None]
    torch._foreach_mul_(gradients, factor)


def local_metrics(micros: list[MicroLoss]) -> tuple[Tensor, Weight | None]:
    """This rank's mean loss and number of labels over some micro-batches, as device tensors."""
    first = micros[0]
    if first.kind == "share":
        loss = torch.stack([micro.loss.detach() for micro in micros]).sum()
    else:
        top = [micro.loss.detach() * (micro.weight if micro.kind == "mean" else 1) for micro in micros]
        weights = [torch.as_tensor(micro.weight, dtype=top[0].dtype, device=top[0].device) for micro in micros]
        loss = torch.stack(top).sum() / torch.stack(weights).sum().clamp(min=1)
    if any(micro.tokens is None for micro in micros):
        return loss, None
    counts = [torch.as_tensor(micro.tokens, dtype=torch.int64, device=loss.device) for micro in micros]
    return loss, torch.stack(counts).sum()


def loss_dict(step_loss: StepLoss) -> dict[str, Tensor]:
    """The reduced losses by name: what the forward step reported, else the loss itself as `lm loss`."""
    return step_loss.reports or {"lm loss": step_loss.value()}
