"""The two models that the loops are compared on, and the clock that runs in all of them alike.

Every framework calls the model's forward once a step and reaches torch's backward engine once, so these two places are
where time is taken, the same in all of them; the clock starts at the forward pass after the warm-up steps, so that no
framework's set-up counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH = 64, 64, 4, 2, 64
WINDOW = 10
"""Steps that are timed together: as many as lie between two logged ones."""


class Clock:
    """Seconds of `steps` whole steps, from one entry of forward to another, and what of them forward and backward took.

    Args:
        warmup: steps before the clock starts.
        steps: a multiple of `WINDOW`.
        now: what tells the time, in seconds.
        on_start: called where the measured steps begin.
        on_end: called where they are over.
    """

    def __init__(
        self,
        warmup: int,
        steps: int,
        now: Callable[[], float] = time.perf_counter,
        on_start: Callable[[], object] | None = None,
        on_end: Callable[[], object] | None = None,
    ) -> None:
        self.warmup, self.steps, self.now = warmup, steps, now
        self.num_forwards = self.num_backwards = 0
        self.inside = 0.0
        """Seconds in forward and backward passes so far."""
        self._marks: list[tuple[float, float, int]] = []
        self._on_start, self._on_end = on_start, on_end

    @property
    def run_steps(self) -> int:
        """Steps that a run must make for the measured ones to be whole."""
        return self.warmup + self.steps + 1

    def enter_forward(self) -> float:
        """Count a step; returns the time."""
        step = self.num_forwards - self.warmup
        if step == 0 and self._on_start is not None:
            self._on_start()
        if step >= 0 and step % WINDOW == 0:
            self._marks.append((self.now(), self.inside, self.num_backwards))
        if step == self.steps and self._on_end is not None:
            self._on_end()
        self.num_forwards += 1
        return self.now()

    def times(self) -> tuple[float, float]:
        """Seconds of a step, and of what is neither its forward nor its backward pass.

        Both are medians over windows of `WINDOW` steps, so that a moment in which the machine did something else does
        not count, and what is done at every tenth step does.

        Raises:
            RuntimeError: the run did not do one forward and one backward pass in each of the steps that were asked for.
        """
        backwards = self._marks[-1][2] - self._marks[0][2]
        if self.num_forwards != self.run_steps or backwards != self.steps:
            raise RuntimeError(
                f"expected {self.run_steps} forward passes and {self.steps} backward passes after the warm-up, got "
                f"{self.num_forwards} and {backwards}: the row does not train as the others do"
            )
        whole = [after[0] - before[0] for before, after in pairwise(self._marks)]
        inside = [after[1] - before[1] for before, after in pairwise(self._marks)]
        outside = [one - other for one, other in zip(whole, inside, strict=True)]
        return statistics.median(whole) / WINDOW, statistics.median(outside) / WINDOW

    @contextmanager
    def timing_backward(self) -> Iterator[None]:
        """Take the time of torch's backward engine, which `Tensor.backward` and `torch.autograd.backward` reach."""
        engine: Any = torch.autograd
        plain = engine._engine_run_backward

        def timed(*args: Any, **options: Any) -> Any:
            begin = self.now()
            result = plain(*args, **options)
            self.inside += self.now() - begin
            self.num_backwards += 1
            return result

        engine._engine_run_backward = timed
        try:
            yield
        finally:
            engine._engine_run_backward = plain


class Linear8(nn.Module):
    """One linear layer, 8 to 8: the step is nearly nothing but the loop and the optimizer."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.layer, self.clock = nn.Linear(8, 8), clock

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The mean squared error."""
        begin = self.clock.enter_forward()
        outputs = self.layer(x)
        loss = mse_loss(outputs, labels)
        self.clock.inside += self.clock.now() - begin
        return {"loss": loss, "logits": outputs}


class SmallGPT(nn.Module):
    """A decoder of 0.1M parameters: two layers of width 64 on 64 tokens."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.embedding, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH), persistent=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The mean cross-entropy of `labels`, (batch, seq) as `input_ids`."""
        begin = self.clock.enter_forward()
        hidden = self.embedding(input_ids) + self.positions.weight
        logits = self.output(self.layers(hidden, mask=self.mask, is_causal=True))
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten())
        self.clock.inside += self.clock.now() - begin
        return {"loss": loss, "logits": logits}


@dataclass
class Workload:
    """A model, its one batch, and how many steps a block of it has."""

    name: str
    make_model: Callable[[Clock], nn.Module]
    batch: dict[str, Tensor]
    warmup: int
    steps: int

    @property
    def num_samples(self) -> int:
        """Samples of the batch."""
        return next(iter(self.batch.values())).shape[0]


def workloads() -> tuple[Workload, Workload]:
    """The trivial model and the small GPT."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(8, 8, generator=generator) for _ in range(2))
    tokens = torch.randint(VOCABULARY, (4, LENGTH), generator=generator)
    return (
        Workload("trivial model (linear 8x8)", Linear8, {"x": x, "labels": y}, 50, 200),
        Workload("0.1M GPT", SmallGPT, {"input_ids": tokens, "labels": tokens.roll(-1, 1)}, 5, 30),
    )
