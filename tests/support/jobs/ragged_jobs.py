"""What the ranks run whose data ends at different places: `job_train` and `job_evaluate` with a Trainer, `job_loop` and
`job_evaluate_in_loop` without.

`lengths` of the settings has the number of samples of each rank.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from onstep import Trainer, TrainingArguments
from onstep.config import ConfigContainer
from onstep.data import EvalLoader, IterableLoader, IteratorReader
from onstep.distributed import World, data_parallel, open_world
from onstep.errors import DataError
from onstep.optim import TrainingOptimizer
from onstep.training import GlobalState, evaluate, train
from tests.support.seen_samples import SeenSamples, die_with_all_ranks
from tests.support.small_models import Regression, arguments, regression_rows
from tests.support.small_runs import LENGTH, RaggedRows, TinyModel, sum_step

ROWS = regression_rows(60)


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


class Stream(IterableDataset[Any]):
    """The first samples of the list."""

    def __init__(self, rows: Any, length: int) -> None:
        self.rows, self.length = rows, length

    def __iter__(self) -> Iterator[Any]:
        return (self.rows[number] for number in range(self.length))


class Sized(Stream):
    def __len__(self) -> int:
        return self.length


class Stateful(Stream):
    """A stream that continues from its position, and starts over after its end."""

    position = 0

    def __iter__(self) -> Iterator[Any]:
        while self.position < self.length:
            self.position += 1
            yield self.rows[self.position - 1]
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


STREAMS = {one.__name__: one for one in (Stream, Sized, Stateful)}


def job_train(settings: dict[str, Any]) -> dict[str, Any]:
    """Train a Trainer on a stream of which each rank keeps its share."""
    read = SeenSamples(settings.get("until", 0), die_with_all_ranks)
    values = {
        "output_dir": "run",
        "per_device_train_batch_size": 4,
        "max_steps": 8,
        "learning_rate": 0.05,
        "logging_steps": 1,
        "save_steps": 3,
        "use_cpu": True,
        **settings.get("arguments", {}),
    }
    stream = STREAMS[settings.get("kind", "Stream")](ROWS, settings["lengths"][rank()])
    args = TrainingArguments(**values)
    trainer = Trainer(Regression(), args, train_dataset=stream, callbacks=[read], default_callbacks=False)
    error = ""
    try:
        trainer.train(resume_from_checkpoint=settings.get("resume"))
    except DataError as found:
        error = str(found)
    history = trainer.state.log_history if trainer.state is not None else []
    losses = [record["loss"] for record in history if "loss" in record]
    return {"steps": read.steps, "losses": losses, "error": error}


def text_rows(length: int) -> Iterator[Any]:
    """Micro-batches of two samples."""
    samples = RaggedRows(64)
    return (default_collate([samples[number], samples[number + 1]]) for number in range(0, length, 2))


def own_source(length: int, size: int) -> Any:
    """A source with all methods of one, which does not say where its ranks end."""
    source = IteratorReader(text_rows(length), world_size=size)
    del source.compared_by
    return source


def share_of_stream(length: int, size: int) -> Any:
    stream = Stream(RaggedRows(64), length)
    return IterableLoader(stream, micro_batch_size=2, global_batch_size=4 * size, rank=rank(), world_size=size)


SOURCES = {"source": own_source, "loader": share_of_stream}


def job_loop(settings: dict[str, Any]) -> dict[str, Any]:
    """Call `train()` with a source, in steps of two micro-batches of two samples."""
    config, size = ConfigContainer(), len(settings["lengths"])
    config.train.micro_batch_size, config.train.train_iters = 2, 4
    config.train.global_batch_size = 4 * size
    config.model.seq_length, config.dist.device = LENGTH, "cpu"
    with closing(open_world(config.dist)) as world:
        return _trained(settings, config, world)  # the model must not outlive the group of its ranks


def _trained(settings: dict[str, Any], config: ConfigContainer, world: World) -> dict[str, Any]:
    state = GlobalState(config, world)
    state.num_microbatches = 2
    model = data_parallel([TinyModel()], world, config.ddp)
    optimizer = TrainingOptimizer(torch.optim.SGD(model[0].parameters(), lr=0.1))
    data = SOURCES[settings["source"]](settings["lengths"][rank()], world.size)
    train(sum_step, model, optimizer, None, data, None, state)
    return {"step": state.train_state.step, "weights": float(sum(p.sum() for p in model[0].parameters()))}


def own_rows(lengths: list[int]) -> list[Any]:
    """The samples of this rank, which no other one has."""
    start = sum(lengths[: rank()])
    return ROWS[start : start + lengths[rank()]]


class Own(Trainer):
    """Evaluates a loader of each rank's own."""

    loader: Any = None

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return self.loader

    def get_test_dataloader(self, test_dataset: Any = None) -> Any:
        return self.loader


def counted(prediction: Any, compute_result: bool = True, counts: list[int] | None = None) -> dict[str, Any]:
    assert counts is not None
    counts.append(len(prediction.label_ids))
    return {"rows": sum(counts)}


def job_evaluate(settings: dict[str, Any]) -> dict[str, Any]:
    """Evaluate and predict, or train with evaluations, with a Trainer on the `kind` of data; the error is a result."""
    lengths, kind, result = settings["lengths"], settings["kind"], {}
    trains = settings.get("trains", False)
    values = {"per_device_eval_batch_size": 2, "batch_eval_metrics": settings.get("by_batch", False)}
    if trains:
        values |= {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 4}
    args = arguments(Path(), **values)
    args.config_overrides |= settings.get("overrides", {})
    data: Any = ROWS if kind.startswith("own") else ROWS[: lengths[rank()]]
    if kind == "stream":
        data = Stream(ROWS, lengths[rank()])
    make = Own if kind.startswith("own") else Trainer
    trainer = make(
        Regression(),
        args,
        train_dataset=ROWS[:16],
        eval_dataset=data,
        compute_metrics=partial(counted, counts=[]) if settings.get("by_batch") else None,
        default_callbacks=False,
    )
    if kind == "own stream":
        rows = own_rows(lengths)
        Own.loader = DataLoader(Stream(rows, len(rows)), batch_size=2)
    elif kind == "own list":
        Own.loader = DataLoader(ROWS[: lengths[rank()]], batch_size=2)  # type: ignore[arg-type]
    try:
        if trains:
            trainer.train()
            assert trainer.state is not None
            return {"losses": [record["eval_loss"] for record in trainer.state.log_history if "eval_loss" in record]}
        if not settings.get("only_predicts"):
            metrics = trainer.evaluate()
            result |= {key: metrics[key] for key in metrics if key in ("eval_loss", "eval_rows", "eval_perplexity")}
        if not settings.get("by_batch"):
            output = trainer.predict(data)
            result |= {"labels": sorted(output.label_ids.tolist()), "count": len(output.predictions)}
            loop = trainer.evaluation_loop(trainer.get_eval_dataloader(), "Evaluation")
            result |= {"num_samples": loop.num_samples}
    except DataError as error:
        result["error"] = str(error)
    return result


def popping_step(data_iterator: Any, model: Any) -> Any:
    """A forward step that takes its batch apart."""
    batch = next(data_iterator)
    labels = batch.pop("labels")
    return model(batch.pop("tokens"), labels), lambda loss: (loss, labels.ne(-100).sum(), {})


def job_evaluate_in_loop(settings: dict[str, Any]) -> dict[str, Any]:
    """Call `evaluate()` with iterators of each rank's own, or with an `EvalLoader`, in batches of two micro-batches."""
    config, lengths = ConfigContainer(), settings["lengths"]
    config.train.micro_batch_size, config.train.global_batch_size = 2, 4 * len(lengths)
    config.validation.eval_iters = settings.get("eval_iters")
    config.model.seq_length, config.dist.device = LENGTH, "cpu"
    with closing(open_world(config.dist)) as world:
        return _evaluated(settings, config, world)


def _evaluated(settings: dict[str, Any], config: ConfigContainer, world: World) -> dict[str, Any]:
    state, length = GlobalState(config, world), settings["lengths"][rank()]
    state.num_microbatches = state.num_eval_microbatches = 2
    model = data_parallel([TinyModel()], world, config.ddp)
    data: Any = text_rows(length)
    if settings.get("loader"):
        data = EvalLoader(
            RaggedRows(length), micro_batch_size=2, num_microbatches=2, rank=rank(), world_size=world.size
        )
    try:
        means = evaluate(state, popping_step, data, model, None, config.model)[0]
    except DataError as error:
        return {"error": str(error)}
    assert means is not None
    return {"loss": float(means["lm loss"]), "samples": state.train_state.consumed_valid_samples}
