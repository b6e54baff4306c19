"""Runs that take milliseconds: a model of two layers, ragged rows, everything handed to `train()` by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from onstep import CallbackManager
from onstep.config import ConfigContainer
from onstep.data import EvalLoader, StepBatches, TrainLoader
from onstep.distributed import data_parallel
from onstep.events import Dispatcher
from onstep.optim import TrainingOptimizer
from onstep.training import GlobalState, train
from onstep.training.stages.job import Job, drive

VOCABULARY, LENGTH = 16, 12


class RaggedRows(torch.utils.data.Dataset[Any]):
    """Rows of 12 tokens of which 1 to 9 have a label; the rows in `empty` have none."""

    def __init__(self, size: int = 12, empty: tuple[int, ...] = ()) -> None:
        self.size, self.empty = size, empty

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(0, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(index))
        labels = tokens.roll(-1).clone()
        labels[0 if index in self.empty else 1 + index % 9 :] = -100
        return {"tokens": tokens, "labels": labels}


class TinyModel(nn.Module):
    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCABULARY, 8, dtype=dtype)
        self.out = nn.Linear(8, VOCABULARY, dtype=dtype)

    def forward(self, tokens: Tensor, labels: Tensor, reduction: str = "sum") -> Tensor:
        logits = self.out(self.embed(tokens))
        return cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=reduction)


def sum_step(data_iterator: Any, model: nn.Module) -> Any:
    """The exact convention: (sum, count, report)."""
    batch = next(data_iterator)
    return model(**batch), lambda loss: (loss, batch["labels"].ne(-100).sum(), {})


def mean_step(data_iterator: Any, model: nn.Module) -> Any:
    """The plain mean of a micro-batch."""
    return model(**next(data_iterator), reduction="mean"), lambda loss: (loss, {})


def stack(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


def split(dataset: Any, sizes: list[int]) -> StepBatches:
    """All rows of `dataset` as micro-batches of the given sizes."""
    rows = iter([dataset[index] for index in range(len(dataset))])
    micro_batches = [stack([next(rows) for _ in range(size)]) for size in sizes]
    return StepBatches(micro_batches, None, len(dataset), [False] * len(sizes))


def small_state(micro: int = 2, batch: int = 4, **train_fields: Any) -> GlobalState:
    config = ConfigContainer()
    config.train.micro_batch_size, config.train.global_batch_size = micro, batch
    config.model.seq_length = LENGTH
    config.logger.log_interval, config.validation.eval_iters = 0, None
    for name, value in train_fields.items():
        setattr(config.train, name, value)
    return GlobalState(config, num_microbatches=batch // micro)


def loader(size: int = 12, **options: Any) -> TrainLoader:
    return TrainLoader(RaggedRows(size), micro_batch_size=2, global_batch_size=4, **options)


def eval_loader(size: int = 6) -> EvalLoader:
    return EvalLoader(RaggedRows(size), micro_batch_size=2)


def run(
    state: GlobalState,
    callbacks: CallbackManager | None = None,
    *,
    step: Any = sum_step,
    data: Any = None,
    valid: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    scheduler: Any = None,
) -> nn.Module:
    """`train()` with whatever is not given made small; a model that is not given is wrapped for the ranks."""
    if model is None:
        [model] = data_parallel([TinyModel()], state.world, state.cfg.ddp)
    optimizer = optimizer or TrainingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    train(step, [model], optimizer, scheduler, data or loader(), valid, state, callback_manager=callbacks)
    return model


def small_job(state: GlobalState, model: nn.Module | None = None, optimizer: Any = None, step: Any = sum_step) -> Job:
    """What `train()` makes of its arguments, for a feature or a loop by itself."""
    model = model or TinyModel()
    optimizer = optimizer or TrainingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    return Job(
        run=state,
        forward_step_func=step,
        raw_forward_step_func=step,
        model=[model],
        optimizer=drive(optimizer, [model], state),
        raw_optimizer=optimizer,
        scheduler=None,
        reader=loader(),
        notify=Dispatcher(None, state, [model], optimizer),
    )
