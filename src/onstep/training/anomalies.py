"""What is not finite is never applied and never hidden: the error names step, rank and samples."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

from onstep.errors import NonFiniteError
from onstep.optim import TrainingOptimizer, finite_gate
from onstep.training.losses import MicroLoss
from onstep.training.state import GlobalState

_REMEMBERED_STEPS = 16
"""A device tells of a bad step at most 10 steps late."""


@dataclass(frozen=True)
class StepRecord:
    """What is kept of a step until it is known to be finite."""

    step: int
    sample_ids: list[list[int]] | None
    micros: list[MicroLoss]


class AnomalyWatch:
    """Watches the finite gate and remembers the last steps, to name what was in a bad one.

    A `TrainingOptimizer` has its own gate; for any other optimizer `train_step` keeps one in `state.gate`. Both start
    open: what an earlier `train()` met is over.
    """

    def __init__(self, state: GlobalState, optimizer: Any) -> None:
        self._state = state
        if isinstance(optimizer, TrainingOptimizer):
            self._gate = optimizer.gate
            self._gate.reset()
        else:
            self._gate = state.gate = finite_gate(state.world.device)
        self._records: deque[StepRecord] = deque(maxlen=_REMEMBERED_STEPS)

    def begin_step(self) -> None:
        """Number the step that starts."""
        self._gate.begin_step(self._state.train_state.step + 1)

    def end_step(self, sample_ids: list[list[int]] | None, micros: list[MicroLoss]) -> None:
        """Remember the step, and raise if the gate already knows of a bad one.

        Raises:
            NonFiniteError: on all ranks at the same step.
        """
        self._records.append(StepRecord(self._state.train_state.step + 1, sample_ids, micros))
        self.check()

    def check(self, wait: bool = False) -> None:
        """Raise if a bad step is known; `wait` asks the device for certain, as at logged steps.

        Raises:
            NonFiniteError: naming the first bad step, its rank and its samples.
        """
        step = self._gate.poll(force=wait)
        if step is not None:
            raise NonFiniteError(self._describe(step))

    def _describe(self, step: int) -> str:
        record = next((one for one in self._records if one.step == step), None)
        mine = None if record is None else _bad_micro_batches(record)
        ids = None if record is None else record.sample_ids
        # every rank learns of it at the same step, from a norm that all of them share, so asking is safe
        by_rank = self._state.world.gather((mine, ids))
        culprits = [f"rank {rank}, {where}" for rank, (where, _) in enumerate(by_rank) if where]
        found = "; ".join(culprits) or (
            "every local loss was finite, so a gradient overflowed or became NaN in the backward pass of "
            + "; ".join(f"rank {rank}, sample ids {read}" for rank, (_, read) in enumerate(by_rank) if read)
        )
        return (
            f"NaN or infinity in the loss or gradient norm of step {step}: {found}. train.on_nonfinite=raise: the "
            f"update was not applied and the weights are those of step {step - 1}. Look at these samples, or lower "
            f"optimizer.lr."
        )


def _bad_micro_batches(record: StepRecord) -> str:
    bad = [number for number, micro in enumerate(record.micros) if not math.isfinite(float(micro.loss))]
    with_labels = [number for number in bad if float(record.micros[number].weight) != 0]
    return "; ".join(_describe_micro_batch(record, number) for number in with_labels or bad)


def _describe_micro_batch(record: StepRecord, number: int) -> str:
    micro = record.micros[number]
    ids = "" if record.sample_ids is None else f", sample ids {record.sample_ids[number]}"
    empty = "" if float(micro.weight) else ", no labels in it"
    return f"micro-batch {number}: loss {float(micro.loss)}{ids}{empty}"
