"""Calls the user's forward step on the stages of a pipeline, for training and for evaluation."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from onstep.config import ParallelConfig
from onstep.config.pipelines import schedule_of
from onstep.data import Batch, StepBatches
from onstep.distributed.buffered import buffered_chunks
from onstep.distributed.pipeline.kept_activations import refusing_kept_activations
from onstep.distributed.pipeline.seats import Computed, other_stage_of, seat_of
from onstep.distributed.pipeline.stand_ins import Shown
from onstep.distributed.tensor_regions import check_divisible
from onstep.errors import ConfigError, DataError, OtherStageError, text_of
from onstep.events.context import unwrap
from onstep.training.compute.forward_errors import call_forward_step
from onstep.training.compute.losses import described
from onstep.training.compute.step import MicroBatches
from onstep.training.protocols import ForwardStep
from onstep.training.run import Run

if TYPE_CHECKING:
    from onstep.distributed.pipeline.passes import ChunkForward, Passes

TOKENS = ("tokens", "input_ids")
"""The entries of a micro-batch, of which the first one there has the shape of what the model is called with."""


class StagedForward:
    """The forward passes of micro-batches through the stages of this rank.

    Each is a call of the user's forward step with a chunk that begins with what the stage before has computed. Between
    the ends of the pipeline the forward step ends as soon as the chunk has been called: its loss is that of the last
    stage alone.

    Args:
        run: the run.
        forward_step_func: the prepared forward step.
        model: the stages of this rank, ascending.
    """

    def __init__(self, run: Run, forward_step_func: ForwardStep, model: Sequence[nn.Module]) -> None:
        self._run, self._forward_step = run, forward_step_func
        self.chunks: list[Any] = [unwrap(chunk) for chunk in model]
        self.width: int = self.chunks[0].hidden_size
        self._ends = [getattr(seat_of(chunk), "is_last", True) for chunk in self.chunks]
        self._draws = [getattr(chunk, "own_stream", None) for chunk in self.chunks]
        self._unseen = {number for number, is_last in enumerate(self._ends) if not is_last}
        """The chunks without a loss, before their first pass."""
        self._starts: dict[int, Tensor] = {}
        """The state of torch's generator of the CPU when this rank began each micro-batch of a step."""

    def passes(self, forward: ChunkForward, **options: Any) -> Passes:
        """The pipeline, whose passes call `forward`. Collective the first time."""
        from onstep.distributed.pipeline.passes import Passes  # imports torch's pipelines

        schedule = schedule_of(self._run.cfg.parallel)
        dtype = next(self.chunks[0].parameters()).dtype
        return Passes(self.chunks, self._run.world, schedule, dtype, forward, **options)

    def shapes(self, step: StepBatches) -> list[tuple[int, ...]]:
        """The shapes of the hidden states of each micro-batch on this rank.

        Raises:
            DataError: for micro-batches that do not show them.
            ConfigError: for sequences that tensor-parallel ranks cannot divide.
        """
        return [self._shape(batch) for batch in step.micro_batches]

    def _shape(self, batch: Batch) -> tuple[int, ...]:
        """Its part of the sequences, where they are divided: wherever gradients are recorded."""
        rows, length = _tokens(batch).shape
        ranks = self._run.world.sizes.tp if self._run.cfg.parallel.sequence_parallel else 1
        if ranks == 1 or not torch.is_grad_enabled():
            return rows, length, self.width
        check_divisible(length, ranks)
        return rows, length // ranks, self.width

    def __call__(
        self, micro_batches: MicroBatches, number: int, index: int, received: Tensor | None, **asked: bool
    ) -> Any:
        """The hidden states of a chunk, to be sent on; of the last stage, what the loss function returns.

        Args:
            micro_batches: of the step, which `index` of has been staged.
            number: of the chunk.
            index: of the micro-batch.
            received: what the stage before has computed; None on the first.
            asked: keywords for the loss function.

        Raises:
            ConfigError: for a forward step that does not call the model with its micro-batch, or calls it twice, or
                reads what another stage has.
        """
        chunk, run = self.chunks[number], self._run
        batch = micro_batches.staged
        chunk.set_input_tensor(received)
        handle = None if self._ends[number] else chunk.register_forward_hook(_end)
        try:
            with run.autocast(), self._random_numbers(number, index), self._during_call(number), Shown(chunk):
                result = call_forward_step(
                    self._forward_step, micro_batches, batch, chunk, run.train_state.step, **asked
                )
        except Computed as computed:
            result = computed.output
        except Exception as error:
            refusal = _of_other_stage(error, chunk)
            if refusal is None:
                if not isinstance(error, OtherStageError):
                    seat = chunk.pipeline_seat
                    error.add_note(
                        f"on stage {seat.stage} of a pipeline, with {seat.content}; what others have is not here"
                    )
                raise
            raise refusal from error
        else:
            if handle is not None:
                raise ConfigError(
                    f"the forward step has not called the model on stage {chunk.pipeline_seat.stage} of a pipeline; on "
                    f"each stage it must call model(...) once, with the tokens of next(data_iterator)."
                )
        finally:
            chunk.set_input_tensor(None)
            if handle is not None:
                handle.remove()
        if not micro_batches.is_read:
            raise ConfigError(
                f"the forward step has not read its micro-batch on stage {chunk.pipeline_seat.stage} of a pipeline, "
                f"whose stages would compute different ones; take it from data_iterator: batch = next(data_iterator)."
            )
        return result if handle is None else self._checked(result, batch)

    def _random_numbers(self, number: int, index: int) -> AbstractContextManager[object]:
        """Let each chunk of this rank begin a micro-batch with the random state with which the first one has."""
        if number:
            return _random_state(self._starts[index])
        if len(self.chunks) > 1:
            self._starts[index] = torch.get_rng_state()
        return nullcontext()

    def _during_call(self, number: int) -> AbstractContextManager[object]:
        """What holds from when a chunk is called: one that does not know what other stages draw has numbers of its own,
        and hooks that keep activations for the loss of another stage are refused in its first pass."""
        chunk = self.chunks[number]
        own_stream = self._draws[number] if chunk.training else None
        is_new = number in self._unseen and torch.is_grad_enabled()
        if own_stream is None and not is_new:
            return nullcontext()
        stack, contexts = ExitStack(), list[Callable[[], AbstractContextManager[object]]]()
        if own_stream is not None:
            contexts.append(partial(own_stream, self._run.world.device))
        if is_new:
            self._unseen.remove(number)
            contexts.append(partial(refusing_kept_activations, chunk, chunk.pipeline_seat))

        def enter(*given: object) -> None:
            for context in contexts:
                stack.enter_context(context())

        hook = chunk.register_forward_pre_hook(enter)
        stack.callback(hook.remove)
        return stack

    def _checked(self, output: object, batch: Batch) -> Tensor:
        expected = self._shape(batch)
        if not isinstance(output, Tensor) or tuple(output.shape) != expected:
            raise ConfigError(
                f"a stage of a pipeline has computed {described(output)} where the next one expects {expected}: the "
                f"forward step must call the model with all of the micro-batch's {' or '.join(TOKENS)}; cut sequences "
                f"in the collator."
            )
        return output.contiguous()


def _of_other_stage(error: Exception, chunk: Any) -> OtherStageError | None:
    """The error in place of one that a forward step gets where it reads what another stage has; None for others."""
    seat = chunk.pipeline_seat
    key = error.args[0] if isinstance(error, KeyError) and error.args else None
    stage = other_stage_of(chunk, key) if isinstance(key, str) else None
    if stage is not None:
        return seat.lacks(str(key), stage)  # type: ignore[no-any-return]
    if isinstance(error, (RuntimeError, NotImplementedError)) and re.search(r"\bmeta\b", text_of(error)):
        return without_values(chunk, text_of(error).splitlines()[0])
    return None


def without_values(chunk: Any, why: str) -> OtherStageError:
    """The error of a forward step that reads a weight of the whole model, which this rank has without its values.

    Args:
        chunk: the stage.
        why: what shows it.
    """
    seat = chunk.pipeline_seat
    return OtherStageError(
        f"the forward step or its loss reads a weight that stage {seat.stage} of a pipeline does not have ({why}): it "
        f"has {seat.content}; leave the weight out of them, or set parallel.pipeline_model_parallel_size=1."
    )


@contextmanager
def _random_state(state: Tensor) -> Iterator[None]:
    """Begin with a state of torch's generator of the CPU, and end with the one before."""
    now = torch.get_rng_state()
    torch.set_rng_state(state)
    try:
        yield
    finally:
        torch.set_rng_state(now)


def _end(module: nn.Module, args: object, output: object) -> None:
    raise Computed(output)


def _tokens(batch: Batch) -> Tensor:
    """The tokens of a micro-batch, (batch, seq)."""
    found = [batch[name] for name in TOKENS if name in batch] if isinstance(batch, Mapping) else []
    if not found or not isinstance(found[0], Tensor) or found[0].ndim != 2:
        entries = ", ".join(map(str, batch)) if isinstance(batch, Mapping) else described(batch)
        raise DataError(
            f"a pipeline knows the shape of hidden states from {' or '.join(map(repr, TOKENS))} (batch, seq) of a "
            f"micro-batch, but it has {entries or 'nothing'}; name the tokens so in the collator."
        )
    return found[0]


def check_hooks(parallel: ParallelConfig, model: Sequence[nn.Module]) -> None:
    """Refuse (ConfigError) hooks on gradients of parameters that the schedule of a pipeline does not call.

    Args:
        parallel: the section `parallel` of a configuration.
        model: the stages of this rank.
    """
    schedule = schedule_of(parallel)
    if not schedule.halves_backward:
        return
    given = [chunk for chunk in model if not buffered_chunks([chunk])]  # those have hooks of ours
    for name, one in (named for chunk in given for named in chunk.named_parameters()):
        if one._backward_hooks or one._post_accumulate_grad_hooks:  # torch has no public name for them
            raise ConfigError(
                f"parallel.pipeline_schedule={schedule.name} computes gradients of weights by autograd.grad, which "
                f"does not call the hook of {name}; remove it, or use a schedule without halves of backward passes, "
                f"such as 1F1B or Interleaved1F1B."
            )


def staged_results(
    run: Run, forward_step_func: ForwardStep, step: StepBatches, model: Sequence[nn.Module], **asked: bool
) -> Iterator[tuple[Batch, object]]:
    """A batch's micro-batches, each with its loss function's result, on the last stage; nothing elsewhere. Collective
    over the pipeline, without gradients."""
    staged, micro_batches = StagedForward(run, forward_step_func, model), MicroBatches(step, run.world.device)
    results: dict[int, tuple[Batch, object]] = {}

    def forward(number: int, index: int, received: Tensor | None) -> Tensor:
        batch = micro_batches.stage(index)
        result = staged(micro_batches, number, index, received, **asked)
        if seat_of(staged.chunks[number]).is_last:  # type: ignore[union-attr]
            results[index] = batch, result
            return torch.empty(0)
        return result  # type: ignore[no-any-return]

    staged.passes(forward).forward(staged.shapes(step))
    return (results[index] for index in sorted(results))
