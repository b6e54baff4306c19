"""The loop of a pipeline as it is written by hand with torch's stages and schedules."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.nn.functional import cross_entropy

from onstep.config import ConfigContainer
from onstep.config.pipelines import schedule_of
from onstep.data import TrainLoader
from onstep.distributed import World
from onstep.distributed.pipeline.seats import seats_of_rank
from onstep.models.stages import TransformerStage, cut
from onstep.models.transformer import build_transformer


class _Stage(nn.Module):
    """A stage as torch calls it: tokens at the start, else hidden states."""

    def __init__(self, chunk: TransformerStage) -> None:
        super().__init__()
        self.chunk = chunk

    def forward(self, x: Tensor) -> Any:
        if self.chunk.pipeline_seat.is_first:
            return self.chunk(x)
        self.chunk.set_input_tensor(x)
        return self.chunk(x[..., 0])  # whose shape alone counts


class PipelineByHand:
    """The configured schedule with AdamW and clipping, without Onstep but for the model."""

    def __init__(
        self, config: ConfigContainer, world: World, loader: TrainLoader, micro_batches: int, lr: float
    ) -> None:
        whole = build_transformer(config.model, seed=0)
        chunks = cut(whole, seats_of_rank(config.parallel, config.model.num_layers, world.sizes, world.rank))
        seats = [chunk.pipeline_seat for chunk in chunks]
        self.is_first, self.is_last = (any(getattr(seat, end) for seat in seats) for end in ("is_first", "is_last"))
        self.parameters = [one for chunk in chunks for one in chunk.parameters()]
        stages = [
            PipelineStage(_Stage(chunk), seat.stage, seat.num_stages, world.device)
            for chunk, seat in zip(chunks, seats, strict=True)
        ]
        schedule = schedule_of(config.parallel)
        kind: Any = get_schedule_class(schedule.name)
        given = stages[0] if schedule.chunks == "one" else stages
        self.plan = kind(given, micro_batches, loss_fn=self._loss, scale_grads=False)
        self.optimizer = torch.optim.AdamW(self.parameters, lr=lr, fused=True)
        self.loader, self.micro_batches, self.size = loader, micro_batches, world.size
        self.losses: list[Tensor] = []
        self.clip = config.optimizer.clip_grad or 0.0

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(logits.float().flatten(0, 1), labels.flatten()) / self.micro_batches

    def step(self) -> None:
        """Train on a step's micro-batches."""
        self.optimizer.zero_grad()
        read = self.loader.read(self.micro_batches)
        assert read is not None
        tokens, labels = (torch.cat([one[name] for one in read.micro_batches]) for name in ("tokens", "labels"))
        found: list[Tensor] = []
        given: dict[str, Any] = {"target": labels, "losses": found} if self.is_last else {}
        self.plan.step(*([tokens] if self.is_first else []), return_outputs=False, **given)
        norms = torch._foreach_norm([one.grad for one in self.parameters if one.grad is not None])
        squares = torch.stack(norms).square().sum()
        dist.all_reduce(squares)
        factor = torch.clamp(self.clip / (squares.sqrt() + 1e-6), max=1.0)
        torch._foreach_mul_([one.grad for one in self.parameters if one.grad is not None], factor)
        self.optimizer.step()
        loss = torch.stack(found).sum().detach() if found else torch.zeros(())
        self.losses.append(loss * self.size)  # the ranks average what they have

    def finish(self) -> None:
        """Nothing is left to wait for."""
