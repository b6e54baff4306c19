"""A stage of torch's pipelines whose micro-batches may differ in shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._utils import extract_tensor_meta
from torch.distributed.pipelining.stage import _RecvInfo
from torch.profiler import record_function

from onstep.config.pipelines import Part, name_of_pass
from onstep.distributed.pipeline.seats import Seat
from onstep.distributed.pipeline.stage_shards import StageShards

Forward = Callable[[int, Tensor | None], Tensor]
"""(number of the micro-batch, what the stage before has computed, if any); what is sent on, or the loss."""


class FurtherLosses(Protocol):
    """Losses of layers, which the last stage adds to its own: their sum goes from stage to stage."""

    factor: Tensor | float
    """What their sum is multiplied by; of the micro-batch that the last stage has just computed."""

    def begin(self) -> None:
        """A forward pass of a stage begins."""
        ...

    def collected(self) -> list[Tensor]:
        """Those of the forward pass that ends, 0-d each."""
        ...


class _Call(nn.Module):
    """What torch calls for a stage: the chunk's weights, and the pass of a micro-batch."""

    def __init__(self, chunk: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.chunk = chunk
        self.shards = StageShards(chunk)
        self.index = 0
        self.error: BaseException | None = None
        """What a pass raised, which torch replaces by an error of its own."""
        self.further: FurtherLosses | None = None
        self.is_last = False
        self._forward = forward

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Those of which torch computes gradients by themselves.

        Args:
            recurse: see torch.
        """
        return self.shards.parameters()

    def forward(self, *received: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        try:
            if self.further is None:
                return self._forward(self.index, received[0] if received else None)
            return self._with_further(self.further, received)
        except BaseException as error:
            self.error = error
            raise

    def _with_further(self, further: FurtherLosses, received: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, Tensor]:
        further.begin()
        result = self._forward(self.index, received[0] if received else None)
        kind = torch.promote_types(result.dtype, torch.float32)
        before = received[1] if received else torch.zeros(1, dtype=kind, device=result.device, requires_grad=True)
        parts = [before, *(one.to(before).reshape(1) for one in further.collected())]
        total = torch.stack(parts).sum(0)  # no view: torch detaches it in place
        return result + (total.squeeze(0) * further.factor).to(result) if self.is_last else (result, total)


class Stage(PipelineStage):
    """A stage on this rank.

    torch finds out shapes in the first step and keeps them. All ranks of a pipeline read the same micro-batches, so
    each knows what it will receive: nothing is found out, and every micro-batch has its own shape. There is room for
    what is received from when it is expected until the pass that reads it, not for all micro-batches at all times.
    While a profiler records, it has each pass by the name of `name_of_pass`.

    Args:
        chunk: the model chunk.
        seat: which stage it is.
        ranks: the rank in `group` of each stage.
        group: the ranks of the pipeline.
        device: the device of this rank.
        forward: the forward pass of a micro-batch.
        backward: calls a backward pass; for wrappers of it.
        after_backward: called with the number of a micro-batch whose gradients are complete here.
        further: losses of layers; None for none.
    """

    def __init__(
        self,
        chunk: nn.Module,
        seat: Seat,
        ranks: Sequence[int],
        group: ProcessGroup,
        device: torch.device,
        *,
        forward: Forward,
        backward: Callable[[Callable[[], None]], None],
        after_backward: Callable[[int], None],
        further: FurtherLosses | None = None,
    ) -> None:
        self.call = _Call(chunk, forward)
        self.call.is_last, self._further = seat.is_last, further
        super().__init__(self.call, seat.stage, seat.num_stages, device, group=group)
        self.stage_index_to_group_rank = dict(enumerate(ranks))
        self._backward, self._after_backward = backward, after_backward
        self._expected: tuple[object, ...] | None = None
        self._num_left, self._seat = 0, seat
        self._is_checked = False
        self.neighbours: Sequence[Stage] = ()
        """The other stages of this rank."""

    def expect(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, *, has_backward: bool) -> None:
        """Make room for what the micro-batches of a step bring.

        Args:
            shapes: of the hidden states of each micro-batch.
            dtype: their type.
            has_backward: whether gradients come back.
        """
        self.has_backward, self._num_left = has_backward, len(shapes)
        self.call.further = self._further if has_backward else None
        if has_backward:
            self.call.shards.begin()
        expected = (*shapes, dtype, has_backward)
        if expected == self._expected:
            return
        self._expected, self.chunks, meta = expected, len(shapes), self._stage_meta
        kinds = [torch.promote_types(dtype, torch.float32)] if self.call.further is not None else []
        self.act_send_info = {one: [] if self.is_last else [self.stage_index + 1] for one in range(1 + len(kinds))}
        self.args_recv_info.clear()
        self.grad_recv_info.clear()
        self.grad_send_info = None
        for index, shape in enumerate(shapes):
            moved = [(shape, dtype), *(((1,), kind) for kind in kinds)]
            sent = tuple(_outline(*one, has_backward) for one in moved)
            gradients = tuple(_outline(*one, False) for one in moved)
            meta.inputs = () if self.is_first else sent
            meta.outputs, meta.output_grads, meta.input_grads = sent, gradients, gradients
            self.args_recv_info[index] = self._awaited("hidden", self.stage_index - 1, meta.inputs)
            self.grad_recv_info[index] = self._awaited("grad", self.stage_index + 1, () if self.is_last else gradients)

    def _awaited(self, name: str, source: int, metas: tuple[Any, ...]) -> tuple[_RecvInfo, ...]:
        return tuple(
            _RecvInfo(f"{name}_{number}_{self.stage_index}", source, None, meta) for number, meta in enumerate(metas)
        )

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """What receives the hidden states of a micro-batch, for which it makes room.

        Args:
            fwd_chunk_id: its number.
        """
        self._make_room(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """What receives the gradient of a micro-batch's hidden states, for which it makes room.

        Args:
            bwd_chunk_id: its number.
        """
        if self.has_backward:
            self._make_room(self.grad_recv_info[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        """Take the gradient of a micro-batch's hidden states from the next stage, which is on this rank too.

        Args:
            next_stage_bwd_outputs: the gradient; None counts as zero.
            mb_index: the number of the micro-batch.
        """
        if any(one is None for one in next_stage_bwd_outputs):
            self._make_room(self.grad_recv_info[mb_index])
        super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        """Run the forward pass of a micro-batch.

        Args:
            fwd_chunk_id: its number.
            args: see torch.
            options: see torch.
        """
        self.call.index = fwd_chunk_id
        with self._recorded("forward", fwd_chunk_id):
            result = super().forward_one_chunk(fwd_chunk_id, *args, **options)
        _give_up(self.args_recv_info[fwd_chunk_id])
        if self.has_backward and not self._is_checked:  # 2 ms for eight layers: in the first pass alone
            self._is_checked = True
            self._check_apart(self.fwd_cache[fwd_chunk_id][0])
        return result

    def _check_apart(self, outputs: Sequence[Tensor]) -> None:
        """Refuse (OtherStageError) outputs that depend on what another stage of this rank has computed.

        Halves of backward passes would lose its gradient, and whole ones free what that stage has saved for its own.
        The engine of autograd looks for a way from the outputs and runs nothing if there is none. It begins at views
        of them, as it calls the hooks of where it begins.
        """
        roots = [one.view_as(one) for one in outputs if one.requires_grad]
        own = {id(one) for one in self.call.parameters()}  # a tied embedding may be the other's too
        for other in [stage for stage in self.neighbours if stage.fwd_cache and roots]:
            received = [one for _, inputs in other.fwd_cache.values() for one in inputs]
            inputs = [one for one in (*other.call.parameters(), *received) if one.requires_grad and id(one) not in own]
            starts = [torch.zeros_like(one) for one in roots]
            grad = partial(torch.autograd.grad, roots, inputs, starts, retain_graph=True, allow_unused=True)
            if inputs and any(one is not None for one in grad()):
                raise self._seat.depends_on(other.stage_index)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run the backward pass of a micro-batch, or the part of it that the stage before waits for.

        Args:
            bwd_chunk_id: its number.
            loss: of the last stage.
            full_backward: whether it is all of the pass.
            last_backward: whether it is the last one.
        """
        if not self.has_backward:
            return
        with self._recorded("backward" if full_backward else "input gradient", bwd_chunk_id):
            self._back(partial(super().backward_one_chunk, bwd_chunk_id, loss, full_backward, last_backward))
        _give_up(self.grad_recv_info[bwd_chunk_id])
        if full_backward:
            self._end(bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run the rest of the backward pass of a micro-batch: the gradients of weights.

        Args:
            bwd_chunk_id: its number.
            last_backward: whether it is the last one.
        """
        if not self.has_backward:
            return
        with self._recorded("weight gradient", bwd_chunk_id):
            self._back(partial(super().backward_weight_one_chunk, bwd_chunk_id, last_backward))
        self._end(bwd_chunk_id)

    def _back(self, work: Callable[[], None]) -> None:
        """Call a backward pass; torch puts an error of its own before what the pass raises, which is kept."""
        try:
            self._backward(work)
        except RuntimeError as error:
            self.call.error = error.__cause__ or error
            raise

    def _end(self, index: int) -> None:
        """The gradients of a micro-batch are here; those of a step are summed with the last one."""
        self._num_left -= 1
        if not self._num_left:
            self.call.shards.reduce()
        self._after_backward(index)

    def _make_room(self, expected: Sequence[_RecvInfo]) -> None:
        for one in expected:
            meta: Any = one.tensor_meta
            one.buffer = torch.empty(meta.shape, dtype=meta.dtype, device=self.device)

    def _recorded(self, part: Part, index: int) -> AbstractContextManager[Any]:
        """Where a profiler records, what marks a pass in its trace."""
        if not torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
            return nullcontext()
        return record_function(name_of_pass(part, self.stage_index, index))


def _give_up(received: Sequence[_RecvInfo]) -> None:
    """Hold what was received no longer than what computes with it."""
    for one in received:
        one.buffer = None


def _outline(shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool) -> Any:
    return extract_tensor_meta(torch.empty(shape, dtype=dtype, device="meta", requires_grad=requires_grad))
